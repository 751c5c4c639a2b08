"""Which submodule cannot be exported, and why, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_FIXED_DIMENSION = re.compile(r"size\(\)\[(\d+)\].*(?:specialized it to be|inferred to be) a constant \((\d+)\)")
_RAISING_CALL = re.compile(r'File "([^"]+)", line (\d+), in \w+\n(.+)')

Attempt = Callable[[nn.Module, tuple[Any, ...], Any], object]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def explain_failure(
    module: nn.Module, inputs: tuple[Tensor, ...], dynamic: Collection[int], error: Exception, attempt: Attempt
) -> str:
    """Return a sentence that names the innermost submodule that fails on its own, and the reason.

    Args:
        module: the one that failed.
        inputs: what it was given.
        dynamic: sizes of the dimensions that must stay dynamic; they mark these dimensions in the submodules' inputs.
        error: with which it failed.
        attempt: exports a module on inputs and dynamic shapes; called on submodules.
    """
    calls = _record_calls(module, inputs)
    path, current = "", module
    while True:
        for name, child in _called_children(current, calls):
            failure = _failure(child, calls[child], dynamic, attempt)
            if failure is not None:
                path, current, error = f"{path}.{name}".lstrip("."), child, failure
                break
        else:
            where = f"{path} ({type(current).__name__})" if path else f"its top level ({type(module).__name__})"
            return f"{where} fails: {reason(error)}"


def _called_children(module: nn.Module, calls: Mapping[nn.Module, Call]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the nearest submodules that were called, with their paths; containers are looked through."""
    for name, child in module.named_children():
        if child in calls:
            yield name, child
        else:
            for inner, descendant in _called_children(child, calls):
                yield f"{name}.{inner}", descendant


def reason(error: BaseException) -> str:
    """Return the innermost cause of an error in one sentence, with the line of the model's source where torch tells."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    fixed = _FIXED_DIMENSION.search(text)
    if fixed:
        dimension, size = fixed.groups()
        return f"it fixes dimension {dimension} of an input, which must stay dynamic, to {size}, as it was traced"
    sentence = text.splitlines()[0].strip().rstrip(".")
    frames = _RAISING_CALL.findall(text)
    if frames:
        file, line, code = frames[-1]
        sentence += f", at {Path(file).name} line {line}: `{code.strip()}`"
    return sentence


def _record_calls(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[nn.Module, Call]:
    """Run the module and return the arguments of the first call of each submodule."""
    calls: dict[nn.Module, Call] = {}

    def record(submodule: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(submodule, (args, kwargs))

    hooks = [
        child.register_forward_pre_hook(record, with_kwargs=True) for child in module.modules() if child is not module
    ]
    try:
        with torch.no_grad():
            module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _failure(module: nn.Module, call: Call, dynamic: Collection[int], attempt: Attempt) -> Exception | None:
    """Return what a submodule fails with on the arguments that it was called with; ``None`` if it does not."""
    args, kwargs = call
    values = (*args, *kwargs.values())
    try:
        attempt(_Positional(module, tuple(kwargs)), values, (tuple(_dynamic_dims(v, dynamic) for v in values),))
    except Exception as error:  # torch.export and torch.onnx raise anything
        return error
    return None


class _Positional(nn.Module):
    """A submodule that takes its keyword arguments by position, as the parts of a model do."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *args: Any) -> Any:
        split = len(args) - len(self.names)
        return self.module(*args[:split], **dict(zip(self.names, args[split:], strict=True)))


def _dynamic_dims(value: Any, dynamic: Collection[int]) -> Any:
    if isinstance(value, Tensor):
        return {i: torch.export.Dim.DYNAMIC for i, size in enumerate(value.shape) if size in dynamic}
    if isinstance(value, (list, tuple)):
        return type(value)(_dynamic_dims(item, dynamic) for item in value)
    return None
