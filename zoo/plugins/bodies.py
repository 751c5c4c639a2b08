"""The ops of domain ``zoo`` as ONNX functions in standard operators.

Every exported graph carries these, so that it runs where no plugin is registered. They are written from the formulas in
the docstrings of ``zoo.kernels`` and share no code with the PyTorch references, so that each can prove the other.

All arithmetic is float32; ``CastLike`` returns to the dtype of the node. Padding is replaced by ``Where``, never
multiplied by zero, so NaN in it cannot spread. Names carry the shape suffixes of ``zoo.kernels``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import parser

from zoo.errors import ConfigError
from zoo.plugins.onnx_schema import PLUGIN_ATTRIBUTES
from zoo.plugins.spec import (
    CAUSAL_SHORT_CONV,
    DOMAIN,
    GATED_BIDIRECTIONAL_LINEAR_ATTENTION,
    GATED_DELTA_RULE,
    OpSpec,
)

STRUCTURAL = {
    CAUSAL_SHORT_CONV.name: ("activation",),
    GATED_BIDIRECTIONAL_LINEAR_ATTENTION.name: ("key_gate", "gated_norm"),
    GATED_DELTA_RULE.name: ("normalize",),
}
"""Attributes that choose which operators a body consists of. Others are read by the body when it runs."""

_FLOAT, _INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64

_LOWEST = "-3.4028234e38"

_KEY_NORM_EPS = "1e-6"
"""Under the root of the norm of queries and keys, from the formulas of ``zoo.kernels.gated_delta_rule``."""


def structural_attributes(spec: OpSpec, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those attributes of a node that all nodes of one function body must share."""
    return {name: attributes[name] for name in STRUCTURAL[spec.name]}


def function_body(spec: OpSpec, attributes: Mapping[str, Any], opset: int) -> onnx.FunctionProto:
    """Return the op as an ONNX function.

    Args:
        spec: of the op.
        attributes: a node's; only the structural ones are read, the others stay attributes of the function.
        opset: standard operator set to write it in, equal to that of the model that will hold it.

    Raises:
        ConfigError: no body is written for this op.
    """
    if spec.name not in _WRITERS:
        raise ConfigError(f"there is no ONNX function body for {spec.name}; there is one for {', '.join(_WRITERS)}")
    names = [attribute.name for attribute in spec.attributes] + list(PLUGIN_ATTRIBUTES)
    text = f"""
        <domain: "{DOMAIN}", opset_import: ["": {opset}]>
        {spec.name} <{", ".join(names)}>
            ({", ".join(rule.name for rule in spec.inputs)}) => ({", ".join(rule.name for rule in spec.outputs)})
        {{ {_WRITERS[spec.name](attributes)} }}
    """
    function = parser.parse_function(text)
    function.doc_string = spec.summary
    return function


def _valid_positions(x: str) -> str:
    """Write ``valid_BL1``, true where position < lengths[b], for ``x`` of shape [B, L, channels]."""
    return f"""
        axis_0 = Constant <value_ints = [0]> ()
        axis_1 = Constant <value_ints = [1]> ()
        axis_2 = Constant <value_ints = [2]> ()
        zero_int = Constant <value_int = 0> ()
        one_int = Constant <value_int = 1> ()
        zero = Constant <value_float = 0.0> ()
        one = Constant <value_float = 1.0> ()
        length_1 = Shape <start = 1, end = 2> ({x})
        length = Squeeze (length_1, axis_0)
        positions_L = Range (zero_int, length, one_int)
        positions_1L = Unsqueeze (positions_L, axis_0)
        lengths_int_B = Cast <to = {_INT64}> (lengths)
        lengths_B1 = Unsqueeze (lengths_int_B, axis_1)
        valid_BL = Less (positions_1L, lengths_B1)
        valid_BL1 = Unsqueeze (valid_BL, axis_2)
    """


def _causal_short_conv(attributes: Mapping[str, Any]) -> str:
    """Gather the W events that each position sees, [B, L, W, C], and sum them with their weights."""
    silu = """
        sigmoid_BLC = Sigmoid (z_BLC)
        activated_BLC = Mul (z_BLC, sigmoid_BLC)
    """
    plain = "activated_BLC = Identity (z_BLC)"
    return f"""
        {_valid_positions("x")}
        width_1 = Shape <start = 1, end = 2> (weight)
        width = Squeeze (width_1, axis_0)
        taps_W = Range (zero_int, width, one_int)
        reach_1 = Sub (one_int, width_1)
        distance_W = Add (taps_W, reach_1)
        position_L1 = Unsqueeze (positions_L, axis_1)
        source_LW = Add (position_L1, distance_W)
        exists_LW = GreaterOrEqual (source_LW, zero_int)
        exists_LW1 = Unsqueeze (exists_LW, axis_2)
        source_clamped_LW = Max (source_LW, zero_int)

        x_float_BLC = Cast <to = {_FLOAT}> (x)
        x_clean_BLC = Where (valid_BL1, x_float_BLC, zero)
        window_any_BLWC = Gather <axis = 1> (x_clean_BLC, source_clamped_LW)
        window_BLWC = Where (exists_LW1, window_any_BLWC, zero)
        weight_float_CW = Cast <to = {_FLOAT}> (weight)
        weight_WC = Transpose <perm = [1, 0]> (weight_float_CW)
        terms_BLWC = Mul (window_BLWC, weight_WC)
        z_BLC = ReduceSum <keepdims = 0> (terms_BLWC, axis_2)
        {silu if attributes["activation"] == "silu" else plain}
        y_float_BLC = Where (valid_BL1, activated_BLC, zero)
        y = CastLike (y_float_BLC, x)
    """


def _gated_bidirectional_linear_attention(attributes: Mapping[str, Any]) -> str:
    """O_i = phi(q_i)^T (sum_j w_j phi(k_j) v_j^T) / phi(q_i)^T (sum_j w_j phi(k_j)), then the gated norm.

    w_j = exp(s_j - shift), with the shift and the factor on phi(q_i) that the package docstring explains.
    """
    key_gate, gated_norm = bool(attributes["key_gate"]), bool(attributes["gated_norm"])
    parts = ["q", "k", "v", *(["r"] if gated_norm else [])]
    gate = f"""
        gate_start_1 = Mul (inner_1, count_{len(parts)})
        gate_end_1 = Add (gate_start_1, heads_1)
        s_BLH = Slice (clean_BLP, gate_start_1, gate_end_1, axis_2)
        s_BHL = Transpose <perm = [0, 2, 1]> (s_BLH)
        s_BHL1 = Unsqueeze (s_BHL, axis_3)
        peak_BHL1 = Add (s_BHL1, k_reach_BHL1)
    """
    no_gate = """
        s_BHL1 = Identity (zero)
        peak_BHL1 = Identity (k_reach_BHL1)
    """
    norm = f"""
        square_BHLD = Mul (o_BHLD, o_BHLD)
        mean_BHL1 = ReduceMean <keepdims = 1> (square_BHLD, axis_3)
        eps = Constant <value_float: float = @eps> ()
        radicand_BHL1 = Add (mean_BHL1, eps)
        root_BHL1 = Sqrt (radicand_BHL1)
        normed_BHLD = Div (o_BHLD, root_BHL1)
        norm_weight_float_HD = Cast <to = {_FLOAT}> (norm_weight)
        norm_weight_H1D = Unsqueeze (norm_weight_float_HD, axis_1)
        scaled_BHLD = Mul (normed_BHLD, norm_weight_H1D)
        sigmoid_BHLD = Sigmoid (r_BHLD)
        silu_BHLD = Mul (r_BHLD, sigmoid_BHLD)
        y_BHLD = Mul (scaled_BHLD, silu_BHLD)
    """
    return f"""
        {_valid_positions("packed")}
        axis_3 = Constant <value_ints = [3]> ()
        keep_2 = Constant <value_ints = [0, 0]> ()
        rest_1 = Constant <value_ints = [-1]> ()
        lowest = Constant <value_float = {_LOWEST}> ()
        heads = Constant <value_int: int = @num_heads> ()
        head_dim = Constant <value_int: int = @head_dim> ()
        heads_1 = Unsqueeze (heads, axis_0)
        head_dim_1 = Unsqueeze (head_dim, axis_0)
        inner_1 = Mul (heads_1, head_dim_1)
        split_shape = Concat <axis = 0> (keep_2, heads_1, head_dim_1)
        merged_shape = Concat <axis = 0> (keep_2, inner_1)
        valid_B1L1 = Unsqueeze (valid_BL1, axis_1)

        packed_float_BLP = Cast <to = {_FLOAT}> (packed)
        clean_BLP = Where (valid_BL1, packed_float_BLP, zero)
        {_columns(parts)}

        q_negative_BHLD = Min (q_BHLD, zero)
        q_reach_BHL1 = ReduceMax <keepdims = 1> (q_negative_BHLD, axis_3)
        q_above_BHLD = Add (q_BHLD, one)
        q_shifted_BHLD = Sub (q_BHLD, q_reach_BHL1)
        q_below_BHLD = Exp (q_shifted_BHLD)
        q_positive_BHLD = Greater (q_BHLD, zero)
        phi_q_BHLD = Where (q_positive_BHLD, q_above_BHLD, q_below_BHLD)

        k_negative_BHLD = Min (k_BHLD, zero)
        k_reach_BHL1 = ReduceMax <keepdims = 1> (k_negative_BHLD, axis_3)
        {gate if key_gate else no_gate}
        peak_valid_BHL1 = Where (valid_B1L1, peak_BHL1, lowest)
        shift_BH11 = ReduceMax <keepdims = 1> (peak_valid_BHL1, axis_2)
        log_w_BHL1 = Sub (s_BHL1, shift_BH11)
        w_BHL1 = Exp (log_w_BHL1)
        k_above_BHLD = Add (k_BHLD, one)
        above_BHLD = Mul (k_above_BHLD, w_BHL1)
        k_shifted_BHLD = Add (k_BHLD, log_w_BHL1)
        below_BHLD = Exp (k_shifted_BHLD)
        k_positive_BHLD = Greater (k_BHLD, zero)
        any_phi_k_BHLD = Where (k_positive_BHLD, above_BHLD, below_BHLD)
        phi_k_BHLD = Where (valid_B1L1, any_phi_k_BHLD, zero)

        phi_k_BHDL = Transpose <perm = [0, 1, 3, 2]> (phi_k_BHLD)
        state_BHDD = MatMul (phi_k_BHDL, v_BHLD)
        normaliser_BHD1 = ReduceSum <keepdims = 1> (phi_k_BHDL, axis_3)
        numerator_BHLD = MatMul (phi_q_BHLD, state_BHDD)
        sum_BHL1 = MatMul (phi_q_BHLD, normaliser_BHD1)
        some_BHL1 = Greater (sum_BHL1, zero)
        denominator_BHL1 = Where (some_BHL1, sum_BHL1, one)
        o_BHLD = Div (numerator_BHLD, denominator_BHL1)
        {norm if gated_norm else "y_BHLD = Identity (o_BHLD)"}
        y_BLHD = Transpose <perm = [0, 2, 1, 3]> (y_BHLD)
        y_any_BLE = Reshape (y_BLHD, merged_shape)
        y_float_BLE = Where (valid_BL1, y_any_BLE, zero)
        y = CastLike (y_float_BLE, packed)
    """


def _columns(parts: list[str]) -> str:
    """Write the slices of the packed projection, each [B, H, L, D]."""
    lines = ["count_0 = Constant <value_ints = [0]> ()", "start_0 = Mul (inner_1, count_0)"]
    for index, part in enumerate(parts):
        lines += [
            f"count_{index + 1} = Constant <value_ints = [{index + 1}]> ()",
            f"start_{index + 1} = Mul (inner_1, count_{index + 1})",
            f"{part}_BLE = Slice (clean_BLP, start_{index}, start_{index + 1}, axis_2)",
            f"{part}_BLHD = Reshape ({part}_BLE, split_shape)",
            f"{part}_BHLD = Transpose <perm = [0, 2, 1, 3]> ({part}_BLHD)",
        ]
    return "\n".join(lines)


def _gated_delta_rule(attributes: Mapping[str, Any]) -> str:
    """Scan over positions: forget, compare with the value, write, read. T counts positions, R is T + 1.

    At padding nothing is forgotten, written or read. One such position is added, because neither ONNX Runtime nor the
    reference evaluator scans over none. Row vectors are [1, V], so that products with the state are matrix products.
    """
    normalize = bool(attributes["normalize"])
    return f"""
        {_valid_positions("q")}
        axis_3 = Constant <value_ints = [3]> ()
        norm_eps = Constant <value_float = {_KEY_NORM_EPS}> ()
        scale = Constant <value_float: float = @scale> ()
        valid_BT11 = Unsqueeze (valid_BL1, axis_3)
        log_decay_BTH1 = Unsqueeze (log_decay, axis_3)
        beta_BTH1 = Unsqueeze (beta, axis_3)
        {_positions_first("q", "q", normalize)}
        {_positions_first("k", "k", normalize)}
        {_positions_first("v", "v")}
        {_positions_first("log_decay", "log_decay_BTH1")}
        {_positions_first("beta", "beta_BTH1")}
        a_RBH11 = Exp (log_decay_RBH1X)
        k_RBHK1 = Transpose <perm = [0, 1, 2, 4, 3]> (k_RBH1X)

        final_state, o_RBH1V = Scan <num_scan_inputs = 6, body = position (
            float[] before_BHKV, float[] q_BH1K, float[] k_BH1K, float[] k_BHK1, float[] v_BH1V, float[] a_BH11,
            float[] beta_BH11
        ) => (float[] after_BHKV, float[] read_BH1V) {{
            forgotten_BHKV = Mul (a_BH11, before_BHKV)
            said_BH1V = MatMul (k_BH1K, forgotten_BHKV)
            error_BH1V = Sub (v_BH1V, said_BH1V)
            write_BH1V = Mul (beta_BH11, error_BH1V)
            written_BHKV = Mul (k_BHK1, write_BH1V)
            after_BHKV = Add (forgotten_BHKV, written_BHKV)
            read_BH1V = MatMul (q_BH1K, after_BHKV)
        }}> (initial_state, q_RBH1X, k_RBH1X, k_RBHK1, v_RBH1X, a_RBH11, beta_RBH1X)

        o_THB1V = Slice (o_RBH1V, axis_0, length_1, axis_0)
        o_BTH1V = Transpose <perm = [1, 0, 2, 3, 4]> (o_THB1V)
        o_unscaled_BTHV = Squeeze (o_BTH1V, axis_3)
        o_any_BTHV = Mul (scale, o_unscaled_BTHV)
        o_float_BTHV = Where (valid_BT11, o_any_BTHV, zero)
        o = CastLike (o_float_BTHV, q)
    """


def _positions_first(name: str, x: str, normalize: bool = False) -> str:
    """Write ``<name>_RBH1X`` in float32 from ``x`` [B, T, H, X], zero at padding and at the position added to it."""
    norm = f"""
        {name}_square_BTHX = Mul ({name}_clean_BTHX, {name}_clean_BTHX)
        {name}_sum_BTH1 = ReduceSum <keepdims = 1> ({name}_square_BTHX, axis_3)
        {name}_radicand_BTH1 = Add ({name}_sum_BTH1, norm_eps)
        {name}_root_BTH1 = Sqrt ({name}_radicand_BTH1)
        {name}_ready_BTHX = Div ({name}_clean_BTHX, {name}_root_BTH1)
    """
    return f"""
        {name}_float_BTHX = Cast <to = {_FLOAT}> ({x})
        {name}_clean_BTHX = Where (valid_BT11, {name}_float_BTHX, zero)
        {norm if normalize else f"{name}_ready_BTHX = Identity ({name}_clean_BTHX)"}
        {name}_TBHX = Transpose <perm = [1, 0, 2, 3]> ({name}_ready_BTHX)
        {name}_TBH1X = Unsqueeze ({name}_TBHX, axis_3)
        {name}_after = Constant <value_ints = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]> ()
        {name}_RBH1X = Pad ({name}_TBH1X, {name}_after)
    """


_WRITERS = {
    CAUSAL_SHORT_CONV.name: _causal_short_conv,
    GATED_BIDIRECTIONAL_LINEAR_ATTENTION.name: _gated_bidirectional_linear_attention,
    GATED_DELTA_RULE.name: _gated_delta_rule,
}
