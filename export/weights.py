"""Which tensor of the checkpoint each initializer of an ONNX file is, and whether it still is that tensor, bit by bit.

The exporter renames, transposes and merges weights. ``label_initializers`` writes down, in the file's metadata, which
checkpoint tensors each initializer stands for; ``compare_weights`` holds the file against a checkpoint by these notes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

WEIGHTS_KEY = "zoo.weights"
"""Metadata: {initializer: {"tensors": [checkpoint names], "transposed": bool}} as JSON."""

CONSTANTS_KEY = "zoo.constants"
"""Metadata: {initializer: sha256 of its bytes} as JSON, for initializers that are no checkpoint tensor."""

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def label_initializers(model: ir.Model, weights: Mapping[str, Tensor]) -> None:
    """Name each initializer after its checkpoint tensor (with ``.T`` if transposed) and note the origin of all.

    Args:
        model: an export, changed in place.
        weights: the checkpoint tensors that it reads, in its dtype.
    """
    initializers = model.graph.initializers
    labels: dict[str, dict[str, Any]] = {}
    for old, (tensors, transposed) in _origins(model, weights).items():
        new = tensors[0] + (".T" if transposed else "")
        if new != old:
            value = initializers.pop(old)
            value.name = new
            initializers[new] = value
        labels[new] = {"tensors": tensors, "transposed": transposed}
    constants = {name: _digest(_array(value)) for name, value in initializers.items() if name not in labels}
    model.metadata_props[WEIGHTS_KEY] = json.dumps(labels)
    model.metadata_props[CONSTANTS_KEY] = json.dumps(constants)


def _origins(model: ir.Model, weights: Mapping[str, Tensor]) -> dict[str, tuple[list[str], bool]]:
    """Return for each initializer that is a weight: the checkpoint tensors that it equals, and whether transposed.

    By name where the exporter kept it, else by content. Equal tensors (norms before training) share an initializer.
    """
    initializers = model.graph.initializers
    found: dict[str, tuple[list[str], bool]] = {name: ([name], False) for name in weights if name in initializers}
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, value in initializers.items():
        by_shape.setdefault(_array(value).shape, []).append(name)
    digests: dict[str, str] = {}

    def equal_to(array: np.ndarray) -> str | None:
        candidates = by_shape.get(array.shape, [])
        for name in candidates:
            if name not in digests:
                digests[name] = _digest(_array(initializers[name]))
        digest = _digest(array) if candidates else ""
        return next((name for name in candidates if digests[name] == digest), None)

    for name in [name for name in weights if name not in initializers]:
        array = _from_torch(weights[name])
        for transposed in (False, True) if array.ndim == 2 else (False,):
            match = equal_to(array.T if transposed else array)
            if match is not None and found.setdefault(match, ([], transposed))[1] == transposed:
                found[match][0].append(name)
                break
    return found


def compare_weights(onnx_path: Path | str, state_dict: Mapping[str, Tensor], dtype: str) -> list[str]:
    """Compare the weights in an exported file with a checkpoint, bit by bit.

    Args:
        onnx_path: of an export of this package.
        state_dict: of the part's module, in any floating dtype.
        dtype: ``fp32``, ``fp16`` or ``bf16``: what the file was exported in.

    Returns:
        One sentence per initializer that differs, is missing or has no counterpart; empty if all agree.
    """
    model = ir.load(onnx_path)
    initializers = model.graph.initializers
    weights = json.loads(model.metadata_props.get(WEIGHTS_KEY, "{}"))
    constants = json.loads(model.metadata_props.get(CONSTANTS_KEY, "{}"))
    problems = [f"{name} is missing from the file" for name in (*weights, *constants) if name not in initializers]
    for name, value in initializers.items():
        array = _array(value)
        if name in constants:
            if _digest(array) != constants[name]:
                problems.append(f"constant {name} is not what was exported")
            continue
        if name not in weights and name not in state_dict:
            problems.append(f"{name} stands for no tensor of the checkpoint")
            continue
        label = weights.get(name, {"tensors": [name], "transposed": False})
        for tensor in label["tensors"]:
            if tensor not in state_dict:
                problems.append(f"{name} stands for {tensor}, which the checkpoint does not have")
                continue
            source = state_dict[tensor]
            expected = _from_torch(source.to(_DTYPES[dtype]) if source.is_floating_point() else source)
            difference = _difference(array, expected.T if label["transposed"] else expected)
            if difference:
                problems.append(f"{tensor} {difference}")
    return problems


def _difference(found: np.ndarray, expected: np.ndarray) -> str:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (
            f"is {found.dtype} {list(found.shape)} in the file, but {expected.dtype} {list(expected.shape)} "
            "in the checkpoint"
        )
    bits = np.dtype(f"u{found.dtype.itemsize}")
    different = np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(expected).view(bits)
    count = int(np.count_nonzero(different))
    if not count:
        return ""
    first = np.unravel_index(int(np.argmax(different)), different.shape)
    return f"differs from the checkpoint in {count} of {different.size} values, first at {[int(i) for i in first]}"


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def _from_torch(tensor: Tensor) -> np.ndarray:
    return ir.tensor(tensor.detach().cpu().contiguous()).numpy()


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()
