"""Memory codes of an exported file: the nearest ones, or ties."""

import pytest
import torch

from export.onnx_export import DTYPES
from validate.executors import TorchExecutor
from validate.inputs import cases, draw_inputs
from validate.parity import check_parity
from zoo.kernels.ragged import valid_positions
from zoo.models.sinkrec import CODES, SinkRec
from zoo.models.sinkrec_config import PRESETS
from zoo.models.sinkrec_layers import REACH

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


def checks(model, executor, dtype="fp32", length=9):
    """Return the checks of a model's parts; ``executor`` makes of each what stands for its file."""
    parts = model.parts()
    exact, low = ({part.name: TorchExecutor(part, kind) for part in parts} for kind in (torch.float64, DTYPES[dtype]))
    return list(check_parity(parts, exact, low, {part.name: executor(part) for part in parts}, dtype, length, 0))


def of_codes(found, part="prefill"):
    (check,) = (check for check in found if check.part == part and check.subject.endswith(CODES))
    return check


def check(model, change, *, part="prefill", dtype="fp32", length=9):
    """Return the check of the codes of a part that computes in ``dtype`` and whose codes are changed on the way out."""
    return of_codes(checks(model, lambda part: Changed(part, change, DTYPES[dtype]), dtype, length), part)


@pytest.mark.parametrize("part", ["prefill", "step"])
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
    assert check(model, lambda codes: codes, dtype="fp16", length=65).ok


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_one_long_code_makes_no_ties_of_all_others(model, dtype):
    for level in model.memory.quantizer.training_side.layers:
        level._codebook.embed[0, 15] = 100.0
    found = check(model, lambda codes: (codes + 1) % 15, dtype=dtype)
    assert not found.ok and found.figures["wrong"] > 0.9 * found.figures["values"]


def test_a_number_that_no_code_has_is_wrong(model):
    for number in (-1, 16):
        found = check(model, lambda codes, number=number: torch.full_like(codes, number))
        assert found.figures["wrong"] == found.figures["values"] > 0


def test_where_pytorch_overflows_nothing_is_a_tie(model):
    model.memory.project.weight.data *= 1e6
    assert not check(model, lambda codes: (codes + 1) % 16, dtype="fp16").ok


class Following(Changed):
    """An executor of a file that goes on from its own codes, be they changed or not."""

    def __call__(self, inputs):
        return self.inner(inputs, self.change(self.inner(inputs)[CODES]))


def others(found):
    return [check for check in found if not check.subject.endswith(CODES)]


def test_what_follows_from_a_tie_is_compared_with_what_follows_from_it_in_the_reference(model):
    for level in model.memory.quantizer.training_side.layers:
        level._codebook.embed[0, 8:] = level._codebook.embed[0, :8] + 0.01

    def change(codes):
        return (codes + 8) % 16

    found = others(checks(model, lambda part: Following(part, change)))
    assert len(found) == 24 and all(check.ok for check in found)
    assert not all(check.ok for check in others(checks(model, lambda part: Changed(part, change))))


class Moved:
    """An executor of a float16 file that rounds what it quantises by ``moved`` [M] otherwise than PyTorch does."""

    name = "moved"

    def __init__(self, part, moved):
        self.inner = TorchExecutor(part, torch.float16)
        memory = self.inner.module.model.memory
        encoded = memory.encoded
        memory.encoded = lambda x, before: encoded(x, before) + moved.to(x.dtype)

    def __call__(self, inputs):
        return self.inner(inputs)


@pytest.fixture
@torch.no_grad()
def crossing(model):
    """Give the first history's last event a second code of level 2, as near as its own on the other side.

    Returns what leads over to it: moved by this times more than a rounding error, the event has the second code.
    """
    length = 65
    inputs = draw_inputs(model.parts()[0].signature, cases(length, seed=1000 * length)[0], {}, torch.float16)
    valid = valid_positions(inputs["lengths"], length)
    left = model.memory.encoded(model.embed(inputs["items"], valid), torch.zeros(1, REACH, 64))[0, -1]
    codes = model.codes(inputs["items"], inputs["lengths"])[0, -1]
    books = model.memory.quantizer.codebooks
    assert codes[2] != 15
    left = left - books[0, codes[0]] - books[1, codes[1]]
    across = left - books[2, codes[2]]
    model.memory.quantizer.training_side.layers[2]._codebook.embed[0, 15] = left + (1 + 1e-4) * across
    return across / across.norm()


def test_a_file_that_rounds_otherwise_than_pytorch_may_choose_the_other_code_of_a_tie(model, crossing):
    found = checks(model, lambda part: Moved(part, 0.003 * crossing), "fp16", 65)
    assert of_codes(found).figures["ties"] > 0
    assert all(check.ok for check in found)


def test_a_file_that_errs_by_more_than_rounding_is_found_by_its_codes(model, crossing):
    found = checks(model, lambda part: Moved(part, 0.03 * crossing), "fp16", 65)
    assert not of_codes(found).ok
    assert of_codes(found).figures["share"] > 1


def test_codes_of_a_wrong_shape_are_not_followed_and_named(model):
    every = checks(model, lambda part: Changed(part, lambda codes: codes[..., :1]))
    failed = [found for found in every if not found.ok]
    assert [found.part for found in failed] == ["prefill", "step", "step"]  # from prefill's state, and from any
    assert all(found.detail.startswith("codes") and "has shape" in found.detail for found in failed)


class Once(Following):
    """An executor whose codes are wrong the first time that it runs."""

    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        self.change = lambda codes: codes
        return outputs


def test_the_codes_that_are_followed_are_those_that_are_judged(model):
    found = checks(model, lambda part: Once(part, lambda codes: (codes + 1) % 16))
    assert all(check.ok for check in others(found))
    assert not of_codes(found, "prefill").ok and not of_codes(found, "step").ok
