"""Memory codes of an exported file: the nearest ones, or ties."""

import pytest
import torch

from validate.codes import check_codes
from validate.executors import TorchExecutor
from validate.parity import check_parity
from zoo.models.sinkrec import CODES, PRESETS, SinkRec

SIZES = {"num_items": 50, "window": 8, "codebook_size": 16, "num_loops": 1, "group": "T"}


@pytest.fixture
def model():
    torch.manual_seed(0)
    found = SinkRec(PRESETS["sinkrec-tiny"].with_overrides(**SIZES)).eval()
    for level in found.memory.quantizer.training_side.layers:
        torch.nn.init.normal_(level._codebook.embed)
    return found


class Changed:
    """An executor of a file whose codes are changed on the way out."""

    name = "changed"

    def __init__(self, part, change, dtype=torch.float32):
        self.inner, self.change = TorchExecutor(part, dtype), change

    def __call__(self, inputs):
        outputs = self.inner(inputs)
        return {**outputs, CODES: self.change(outputs[CODES])}


def check(model, change, *, part=0, dtype="fp32", length=9):
    chosen = model.parts()[part]
    return check_codes(model, chosen, Changed(chosen, change), dtype, length, 0)


@pytest.mark.parametrize("part", [0, 1])
def test_the_models_own_codes_pass(model, part):
    found = check(model, lambda codes: codes, part=part)
    assert found.ok and found.figures["values"] > 0 and found.figures["wrong"] == 0


def test_another_code_is_wrong_and_named(model):
    found = check(model, lambda codes: (codes + 1) % 16)
    assert not found.ok and found.figures["wrong"] > 0
    assert "a code of level 0 is farther than the nearest by" in found.detail and "batch 1, length 9" in found.detail


def test_one_wrong_code_of_a_later_level_is_found(model):
    def change(codes):
        codes = codes.clone()
        codes[0, 0, 2] = (codes[0, 0, 2] + 1) % 16
        return codes

    assert check(model, change).figures["wrong"] >= 1


def test_of_two_codes_that_are_the_same_either_may_be_chosen(model):
    for level in model.memory.quantizer.training_side.layers:
        level._codebook.embed[0, 8:] = level._codebook.embed[0, :8] + 1e-9
    found = check(model, lambda codes: (codes + 8) % 16)
    assert found.ok and found.figures["wrong"] == 0


def test_codes_of_float16_arithmetic_pass_by_its_own_rounding(model):
    chosen = model.parts()[0]
    found = check_codes(model, chosen, Changed(chosen, lambda codes: codes, torch.float16), "fp16", 65, 0)
    assert found.ok


class Following(Changed):
    """An executor of a file that goes on from its own codes, be they changed or not."""

    def __call__(self, inputs):
        return self.inner(inputs, self.change(self.inner(inputs)[CODES]))


def test_what_follows_from_a_tie_is_compared_with_what_follows_from_it_in_the_reference(model):
    for level in model.memory.quantizer.training_side.layers:
        level._codebook.embed[0, 8:] = level._codebook.embed[0, :8] + 0.01
    parts = model.parts()
    exact, low = ({part.name: TorchExecutor(part, dtype) for part in parts} for dtype in (torch.float64, torch.float32))

    def checks(executor):
        executors = {part.name: executor(part, lambda codes: (codes + 8) % 16) for part in parts}
        return list(check_parity(parts, exact, low, executors, "fp32", 9, 0))

    found = checks(Following)
    assert len(found) == 16 and all(check.ok for check in found)
    assert not all(check.ok for check in checks(Changed))


def test_codes_of_a_wrong_shape_are_not_followed(model):
    part = model.parts()[0]
    exact, low = ({part.name: TorchExecutor(part, dtype)} for dtype in (torch.float64, torch.float32))
    executors = {part.name: Changed(part, lambda codes: codes[..., :1])}
    assert all(check.ok for check in check_parity([part], exact, low, executors, "fp32", 9, 0))


class Recording(Changed):
    """An executor that keeps its inputs."""

    def __init__(self, part):
        super().__init__(part, lambda codes: codes)
        self.seen = []

    def __call__(self, inputs):
        self.seen.append(inputs)
        return super().__call__(inputs)


def test_codes_are_judged_on_the_very_inputs_on_which_they_are_followed(model):
    parts = model.parts()
    exact, low = ({part.name: TorchExecutor(part, dtype) for part in parts} for dtype in (torch.float64, torch.float32))
    followed, judged = ({part.name: Recording(part) for part in parts} for _ in range(2))
    list(check_parity(parts, exact, low, followed, "fp32", 9, 0))
    for part in parts:
        check_codes(model, part, judged[part.name], "fp32", 9, 0)
        pairs = list(zip(followed[part.name].seen, judged[part.name].seen, strict=True))
        assert pairs and all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)
