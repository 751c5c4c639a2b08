"""Which tensor of the checkpoint each initializer of an ONNX file is, and whether it still is that tensor, bit by bit.

The exporter renames, transposes and merges weights. ``label_initializers`` writes down, in the file's metadata, which
checkpoint tensors each initializer stands for; ``compare_weights`` holds the file against a checkpoint by these notes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

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
    graph = model.graph
    labels: dict[str, tuple[list[str], bool]] = {}
    for name in weights:
        if name in graph.initializers:
            labels[name] = ([name], False)
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, value in graph.initializers.items():
        by_shape.setdefault(tuple(_array(value).shape), []).append(name)
    digests: dict[str, str] = {}

    def find(array: np.ndarray) -> str | None:
        candidates = by_shape.get(array.shape, [])
        digest = _digest(array) if candidates else ""
        for candidate in candidates:
            if candidate not in digests:
                digests[candidate] = _digest(_array(graph.initializers[candidate]))
            if digests[candidate] == digest:
                return candidate
        return None

    for name in [name for name in weights if name not in labels]:
        array = _from_torch(weights[name])
        for transposed in (False, True):
            if transposed and array.ndim != 2:
                continue
            found = find(array.T if transposed else array)
            if found is not None:
                names, _ = labels.setdefault(found, ([], transposed))
                names.append(name)
                break

    renamed: dict[str, dict[str, object]] = {}
    for old, (names, transposed) in labels.items():
        new = names[0] + (".T" if transposed else "")
        if new != old and new not in graph.initializers:
            value = graph.initializers.pop(old)
            value.name = new
            graph.initializers[new] = value
        else:
            new = old
        renamed[new] = {"tensors": names, "transposed": transposed}
    constants = {name: _digest(_array(value)) for name, value in graph.initializers.items() if name not in renamed}
    model.metadata_props[WEIGHTS_KEY] = json.dumps(renamed)
    model.metadata_props[CONSTANTS_KEY] = json.dumps(constants)


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
            expected = state_dict[tensor].detach()
            expected = _from_torch(expected.to(_DTYPES[dtype]) if expected.is_floating_point() else expected)
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
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()
