"""What every Triton op shares: which implementation runs and why, and how kernels compile without a GPU.

Triton is imported only when a kernel is about to run or compile, so ``zoo.kernels`` imports without it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zoo.errors import ConfigError

MODE_VARIABLE = "TRT_ZOO_KERNELS"
MODES = ("auto", "reference", "triton")
OLDEST_CAPABILITY = (8, 0)
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPABILITIES = (80, 89, 90, 100, 120)
"""Compute capabilities that every kernel is compiled for ahead of time in the tests."""

TRITON_TYPE = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class Choice(NamedTuple):
    """Whether an implementation can be used, and one sentence that says why (or why not)."""

    ok: bool
    reason: str


def choose_triton(device: torch.device, dtype: torch.dtype) -> Choice:
    """Return whether Triton kernels can run on ``device`` in ``dtype``.

    The environment variable ``TRT_ZOO_KERNELS`` decides first: ``reference`` never uses Triton, ``triton`` also allows
    Triton's interpreter on the CPU (with ``TRITON_INTERPRET=1``), ``auto`` is the default.

    Raises:
        ConfigError: the variable holds something else.
    """
    mode = os.environ.get(MODE_VARIABLE) or "auto"
    if mode not in MODES:
        raise ConfigError(f"{MODE_VARIABLE} is {mode!r}; use one of {', '.join(MODES)}")
    if mode == "reference":
        return Choice(False, f"{MODE_VARIABLE}=reference asks for the reference")
    if dtype not in TRITON_DTYPES:
        return Choice(False, f"{dtype} has no Triton kernel; float16, bfloat16 and float32 have")
    if _assumed_capability is None and not _has_triton():
        return Choice(False, 'triton is not installed: pip install -e ".[triton]"')
    if device.type == "cpu":
        if mode == "triton" and is_interpreting():
            return Choice(True, "Triton's interpreter on the CPU")
        return Choice(False, "the tensors are on the CPU")
    if device.type != "cuda":
        return Choice(False, f"the tensors are on {device.type}, and the Triton kernels are for CUDA devices")
    found = capability(device)
    if found < 10 * OLDEST_CAPABILITY[0] + OLDEST_CAPABILITY[1]:
        return Choice(False, f"compute capability {found / 10:.1f} is older than 8.0")
    return Choice(True, f"Triton on compute capability {found / 10:.1f}")


def is_interpreting() -> bool:
    """Return whether Triton kernels are interpreted on the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def capability(device: torch.device) -> int:
    """Return the compute capability of a device as one number, 90 for 9.0; the CPU's interpreter counts as 80."""
    if device.type != "cuda":
        return 80
    return _assumed_capability or _cuda_capability(device.index)


_assumed_capability: int | None = None


@contextlib.contextmanager
def assumed_capability(capability: int) -> Iterator[None]:
    """Let the block choose as on GPUs of this compute capability, which need not be here; not for launching."""
    global _assumed_capability
    before, _assumed_capability = _assumed_capability, capability
    try:
        yield
    finally:
        _assumed_capability = before


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Triton launches on the device of ``x``, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, which decides how far work is split; 132 for anything but CUDA."""
    return _cuda_multiprocessors(device.index) if device.type == "cuda" else 132


@functools.cache
def _cuda_capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@functools.cache
def _cuda_multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(
        index if index is not None else torch.cuda.current_device()
    ).multi_processor_count


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class KernelBuild:
    """One kernel with everything that its compilation needs; nothing in it comes from a live device.

    Attributes:
        name: says op, kernel, dtype, sizes and switches.
        kernel: the ``triton.jit`` function.
        signature: Triton type of every run-time argument, e.g. ``*bf16``, ``i32``, ``tensordesc<bf16[64, 64]>``.
        constants: values of the ``tl.constexpr`` arguments.
        num_warps: warps a program.
        num_stages: depth of the software pipeline.
        divisible: integer arguments that are multiples of 16, as pointers are always taken to be.
        max_registers: most registers of a thread; 0 for any.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    divisible: tuple[str, ...] = ()
    max_registers: int = 0

    def compile(self, capability: int) -> Any:
        """Compile for a compute capability, 90 for 9.0, with no GPU; the result's ``asm`` holds PTX and cubin."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        names = self.kernel.arg_names
        signature = {name: self.signature.get(name, "constexpr") for name in names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name].startswith("*") or name in self.divisible
        }
        kind = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        source = kind(self.kernel, signature, dict(self.constants), aligned)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers:
            options["maxnreg"] = self.max_registers
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
