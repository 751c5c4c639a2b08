"""From PyTorch's custom ops to ``zoo`` nodes: one translation for all, made from the op specs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from onnxscript.values import Opset

from zoo.plugins.onnx_schema import plugin_attributes
from zoo.plugins.spec import DOMAIN, OPS, OpSpec


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
        inputs = [given[rule.name] for rule in spec.inputs]
        attributes = {name: int(given[name]) if kind == "bool" else given[name] for name, kind in kinds.items()}
        return node(*inputs, **attributes, **plugin_attributes(spec))

    translate.__name__ = spec.torch_name
    translate.__signature__ = signature  # type: ignore[attr-defined]
    return translate
