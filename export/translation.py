"""From PyTorch's custom ops to ``zoo`` nodes: one translation for all, made from the op specs.

A node wants more than PyTorch does: every input, each in the dtype of its rule. What a call leaves out becomes zeros,
and what has another dtype is cast, both by standard ops in front of the node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx import numpy_helper
from onnxscript import opset18 as standard
from onnxscript.values import Opset

from zoo.plugins.onnx_schema import plugin_attributes
from zoo.plugins.spec import DOMAIN, OPS, OpSpec, TensorRule


def translation_table() -> dict[Any, Callable[..., Any]]:
    """Return what ``torch.onnx.export`` takes as ``custom_translation_table``, with every op of the zoo."""
    return {getattr(torch.ops.zoo, spec.torch_name).default: translation(spec) for spec in OPS.values()}


def translation(spec: OpSpec) -> Callable[..., Any]:
    """Return the function that makes the ONNX node of one call; the call's arguments are inputs, then attributes."""
    node = getattr(Opset(DOMAIN, spec.version), spec.name)
    names = [rule.name for rule in spec.inputs] + [attribute.name for attribute in spec.attributes]
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])
    kinds = {attribute.name: attribute.kind for attribute in spec.attributes}

    def translate(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        inputs = [_input(spec, rule, given) for rule in spec.inputs]
        attributes = {name: int(given[name]) if kind == "bool" else given[name] for name, kind in kinds.items()}
        return node(*inputs, **attributes, **plugin_attributes(spec))

    translate.__name__ = spec.torch_name
    translate.__signature__ = signature  # type: ignore[attr-defined]
    return translate


def _input(spec: OpSpec, rule: TensorRule, given: dict[str, Any]) -> Any:
    """Return what the node takes for a rule: the given value in the rule's dtype, or zeros where None is given."""
    value = given[rule.name]
    if value is None and rule.optional:
        sizes = [_size(spec, letter, given) for letter in rule.shape]
        zero = numpy_helper.from_array(np.zeros(1, rule.dtype))
        return standard.ConstantOfShape(standard.Concat(*sizes, axis=0), value=zero)
    if rule.dtype == "T":
        shared = next(given[other.name] for other in spec.inputs if other.dtype == "T")
        return value if value.dtype == shared.dtype else standard.CastLike(value, shared)
    wanted = ir.DataType.from_numpy(np.dtype(rule.dtype))
    return value if value.dtype == wanted else standard.Cast(value, to=wanted)


def _size(spec: OpSpec, letter: str, given: dict[str, Any]) -> Any:
    index, axis = spec.size_sources[letter]
    return standard.Shape(given[spec.inputs[index].name], start=axis, end=axis + 1)
