"""The gated delta rule against ONNX's own, the operator ``LinearAttention`` of opset 27."""

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from tests.plugins.running import in_onnx_runtime, in_reference_evaluator
from zoo.kernels import gated_delta_rule

HEADS, KEY_DIM, VALUE_DIM, SCALE = 3, 4, 5, 0.25
RUNS = {"ONNX Runtime": in_onnx_runtime, "reference evaluator": in_reference_evaluator}


@pytest.fixture(scope="module")
def model():
    keys, values, state = HEADS * KEY_DIM, HEADS * VALUE_DIM, ["B", HEADS, KEY_DIM, VALUE_DIM]
    inputs = {"q": keys, "k": keys, "v": values, "state": state, "log_decay": HEADS, "beta": HEADS}
    node = helper.make_node(
        "LinearAttention",
        list(inputs),
        ["o", "final_state"],
        update_rule="gated_delta",
        q_num_heads=HEADS,
        kv_num_heads=HEADS,
        scale=SCALE,
    )

    def value(name, shape):
        return helper.make_tensor_value_info(
            name, TensorProto.FLOAT, ["B", "T", shape] if isinstance(shape, int) else shape
        )

    graph = helper.make_graph(
        [node],
        "linear_attention",
        [value(name, shape) for name, shape in inputs.items()],
        [value("o", values), value("final_state", state)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made


def skip_where_there_is_no_kernel(model):
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} does not load LinearAttention: {error}")


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("length", [1, 7, 64, 65, 130])
@pytest.mark.parametrize("strength", [0.0, 1.0, 20.0], ids=["no decay", "decay", "strong decay"])
def test_our_op_is_the_gated_delta_rule_of_onnx(model, run, length, strength):
    if run is in_onnx_runtime:
        skip_where_there_is_no_kernel(model)
    q, k = torch.randn(2, 2, length, HEADS, KEY_DIM)
    k = torch.nn.functional.normalize(k, dim=-1)
    v, state = torch.randn(2, length, HEADS, VALUE_DIM), torch.randn(2, HEADS, KEY_DIM, VALUE_DIM)
    log_decay, beta = -strength * torch.rand(2, length, HEADS), torch.rand(2, length, HEADS)
    lengths = torch.full((2,), length, dtype=torch.int32)
    o, final_state = run(model, q.flatten(2), k.flatten(2), v.flatten(2), state, log_decay, beta)
    ours = gated_delta_rule(q, k, v, log_decay, beta, state, lengths, scale=SCALE)
    torch.testing.assert_close(o.view(v.shape), ours[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final_state, ours[1], rtol=1e-5, atol=1e-5)
