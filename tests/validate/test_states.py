"""Parity of parts that hand a float32 state on, in every dtype of the parts themselves."""

from dataclasses import replace

import pytest
import torch

from export import export_part
from export.onnx_export import DTYPES
from tests.export.running import WIDTH, Memory
from validate.executors import OrtExecutor, TorchExecutor
from validate.inputs import cases, draw_inputs
from validate.parity import check_parity
from zoo.models.sinkrec import CODES, SinkRec
from zoo.models.sinkrec_config import PRESETS
from zoo.signature import BEFORE


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    sizes = (2, 4, 6)
    first = Memory(sizes, takes_state=False).part("prefill", final_state="state")
    return [first, Memory(sizes).part("step")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_goes_from_part_to_part_in_float32_and_parity_holds(parts, dtype, tmp_path):
    paths = {part.name: export_part(part, tmp_path / f"{part.name}.onnx", dtype=dtype).path for part in parts}
    checks = check_parity(
        parts,
        {part.name: TorchExecutor(part, torch.float64) for part in parts},
        {part.name: TorchExecutor(part, DTYPES[dtype]) for part in parts},
        {part.name: OrtExecutor(paths[part.name], part.signature, dtype) for part in parts},
        dtype,
        33,
        0,
    )
    found = list(checks)
    assert len(found) == 4 and all(check.ok for check in found), [check.detail for check in found]


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_are_drawn_and_run_in_float32(parts, dtype, tmp_path):
    _, step = parts
    case = cases(5, seed=0)[1]
    inputs = draw_inputs(step.signature, case, {}, DTYPES[dtype])
    assert (inputs["x"].dtype, inputs["state"].dtype) == (DTYPES[dtype], torch.float32)
    assert inputs["x"].shape == (case.batch, case.length, WIDTH)
    path = export_part(step, tmp_path / "step.onnx", dtype=dtype).path
    for run in (TorchExecutor(step, DTYPES[dtype]), OrtExecutor(path, step.signature, dtype)):
        outputs = run(inputs)
        assert (outputs["y"].dtype, outputs["final_state"].dtype) == (DTYPES[dtype], torch.float32)
    exact = TorchExecutor(step, torch.float64)(inputs)
    assert {value.dtype for value in exact.values()} == {torch.float64}


class Recording:
    """An executor that keeps what it was given."""

    name = "recording"

    def __init__(self, part):
        self.inner = TorchExecutor(part, torch.float16)
        self.given = []

    def __call__(self, inputs):
        self.given.append(inputs)
        return self.inner(inputs)


def test_a_step_reads_one_event_after_the_state_that_prefill_left_and_then_after_any():
    length = 40
    torch.manual_seed(0)
    model = SinkRec(replace(PRESETS["sinkrec-tiny"], num_items=50, num_loops=1)).eval()
    parts = model.parts()
    exact, low, tried = (
        {part.name: make(part) for part in parts}
        for make in (lambda p: TorchExecutor(p, torch.float64), lambda p: TorchExecutor(p, torch.float16), Recording)
    )
    assert all(check.ok for check in check_parity(parts, exact, low, tried, "fp16", length, 0))
    prefills, steps = tried["prefill"].given, tried["step"].given
    assert len(steps) == 2 * len(prefills)
    for before, after, at_random in zip(prefills, steps[::2], steps[1::2], strict=True):
        for name, value in exact["prefill"](before).items():
            if name != CODES:
                kept = value.to(after[name + BEFORE].dtype)
                assert value.dtype == kept.dtype or value.is_floating_point()
                assert torch.equal(after[name + BEFORE], kept)
                assert not torch.equal(at_random[name + BEFORE], kept)
        assert after["seen_before"].tolist() == before["lengths"].tolist()
        assert after["lengths"][0] == 1 and set(after["lengths"].tolist()) <= {0, 1}
