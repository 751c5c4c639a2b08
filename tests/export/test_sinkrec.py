"""SinkRec's parts as ONNX: what the graphs say is what PyTorch says, at any length and after any history."""

import numpy as np
import onnxruntime
import pytest
import torch

from export import export_part
from zoo.kernels.ragged import valid_positions
from zoo.models.sinkrec import SinkRec, State
from zoo.models.sinkrec_config import PRESETS

ITEMS = 50


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"num_items": ITEMS, "window": 8, "codebook_size": 16, "num_loops": 1, "group": "TA"}
    found = SinkRec(PRESETS["sinkrec-tiny"].with_overrides(**sizes)).eval()
    for level in found.memory.quantizer.training_side.layers:
        torch.nn.init.normal_(level._codebook.embed)
    return found


def session(part, folder, dtype="fp32"):
    exported = export_part(part, folder / f"{part.name}.onnx", dtype=dtype)
    assert exported.ops == {"CausalShortConv": 1, "GatedDeltaRule": 1}
    return onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])


def events(batch, length, lengths):
    times = 10**9 + torch.randint(-100, 10**6, (batch, length)).cumsum(1)
    return torch.randint(ITEMS, (batch, length)), times, torch.tensor(lengths, dtype=torch.int32)


def assert_same(found, wanted):
    for name, ours, theirs in zip(State._fields, found[: len(State._fields)], wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_prefill_and_steps_in_onnx_are_those_of_the_model(model, tmp_path):
    prefill, step = (session(part, tmp_path) for part in model.parts())
    names = [x.name for x in step.get_inputs()]
    for length in (1, 5, 8, 9, 33):
        items, times, lengths = events(3, length, [length, 0, length // 2])
        given = {"items": items, "times": times, "lengths": lengths}
        found = prefill.run(None, {name: x.numpy() for name, x in given.items()})
        with torch.no_grad():
            _, state = model.prefill(items, times, lengths)
            codes = model.codes(items, lengths)
        assert_same(found, state)
        valid = valid_positions(lengths, length)
        assert torch.equal(torch.from_numpy(found[-1])[valid], codes[valid])
        for _ in range(2):
            one = events(3, 1, [1, 1, 0])
            inputs = [x.numpy() for x in one] + list(found[: len(State._fields)])
            found = step.run(None, dict(zip(names, inputs, strict=True)))
            with torch.no_grad():
                _, state = model.step(*one, state)
            assert_same(found, state)
