"""Which submodule cannot be exported, and why, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

Attempt = Callable[[nn.Module, tuple[Any, ...], Any], object]


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
        for name, child in current.named_children():
            dotted = f"{path}.{name}" if path else name
            failure = _try(child, calls, dynamic, attempt)
            # A container such as ModuleList is never called itself; its members are.
            descend = next(
                (
                    (f"{dotted}.{inner}", member, found)
                    for inner, member in child.named_modules()
                    if failure is None and child not in calls and inner
                    for found in [_try(member, calls, dynamic, attempt)]
                    if found is not None
                ),
                None,
            )
            if failure is not None:
                path, current, error = dotted, child, failure
                break
            if descend is not None:
                path, current, error = descend
                break
        else:
            where = f"{path} ({type(current).__name__})" if path else f"its top level ({type(module).__name__})"
            return f"{where} fails: {reason(error)}"


def reason(error: BaseException) -> str:
    """Return the innermost cause of an error in one line, with the line of source where torch names it."""
    text = str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    innermost = str(error).strip() or type(error).__name__
    line = next(line.strip() for line in innermost.splitlines() if line.strip())
    source = re.search(r"Caused by: (?:\([^)]*\)\s*)?(.*)", text) or re.search(r'File "([^"]+)", line (\d+)', text)
    return f"{line} ({source.group(0).strip()})" if source else line


def _record_calls(
    module: nn.Module, inputs: tuple[Tensor, ...]
) -> dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Run the module and return the arguments of the first call of each submodule."""
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def record(submodule: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(submodule, (args, kwargs))

    hooks = [child.register_forward_pre_hook(record, with_kwargs=True) for child in module.modules()]
    try:
        with torch.no_grad():
            module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _try(
    module: nn.Module, calls: dict[nn.Module, Any], dynamic: Collection[int], attempt: Attempt
) -> Exception | None:
    """Return what a submodule fails with on the arguments that it was called with; ``None`` if it does not."""
    if module not in calls:
        return None
    args, kwargs = calls[module]
    wrapper = _WithArguments(module, kwargs)
    try:
        attempt(wrapper, args, (tuple(_dynamic_dims(value, dynamic) for value in args),))
    except Exception as error:  # torch.export and torch.onnx raise anything
        return error
    return None


class _WithArguments(nn.Module):
    """A submodule with its keyword arguments bound, so that it takes positional tensors like any part."""

    def __init__(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs

    def forward(self, *args: Any) -> Any:
        return self.module(*args, **self.kwargs)


def _dynamic_dims(value: Any, dynamic: Collection[int]) -> Any:
    if isinstance(value, Tensor):
        return {i: torch.export.Dim.DYNAMIC for i, size in enumerate(value.shape) if size in dynamic}
    if isinstance(value, (list, tuple)):
        return type(value)(_dynamic_dims(item, dynamic) for item in value)
    return None
