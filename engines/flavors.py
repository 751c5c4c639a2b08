"""The two flavors of TensorRT behind one API: which module, which GPUs it builds for, where its engines go."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.driver import present_gpu
from engines.rtx_libraries import make_findable
from zoo.errors import ConfigError, MissingDependencyError


@dataclass(frozen=True)
class Flavor:
    """An installed flavor of TensorRT.

    Attributes:
        name: ``"rtx"`` or ``"tensorrt"``.
        module: the Python module with the nvinfer1 API.
        version: of TensorRT.
        targets: compute capabilities that it builds for, such as ``"sm89"``.
        default_targets: those that are built when none are named.
        needs_gpu: whether it builds on, and only for, the GPU that is here.
    """

    name: str
    module: Any
    version: str
    targets: tuple[str, ...]
    default_targets: tuple[str, ...]
    needs_gpu: bool

    @property
    def folder(self) -> str:
        """Name of the folder of its engines: an engine runs with the very version that built it."""
        return f"{self.name}-{self.version}"

    def check_targets(self, targets: Sequence[str] | None) -> tuple[str, ...]:
        """Return ``targets`` sorted and without repetition, or the default ones for None.

        Raises:
            ConfigError: none, or one that the flavor cannot build for; the message names those that it can.
        """
        if targets is None:
            return self.default_targets
        if isinstance(targets, str) or not targets:
            raise ConfigError(f"targets is {targets!r}; give a list such as {list(self.default_targets)}")
        for target in targets:
            if target not in self.targets:
                raise ConfigError(self._unknown_target(target))
        return tuple(sorted(set(targets), key=lambda target: int(target[2:])))

    def configure_target(self, config: Any, target: str) -> None:
        """Set the builder configuration to build for ``target``."""
        if not self.needs_gpu:
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(self.module.ComputeCapability, target.upper()), 0)

    def _unknown_target(self, target: str) -> str:
        if self.needs_gpu:
            return (
                f"target {target!r} is not the GPU of this machine: the tensorrt flavor builds on the GPU that it "
                f"builds for, here {', '.join(self.targets)}; leave --targets out"
            )
        hopper = "; H100 and H200 (sm90) need --flavor tensorrt" if target in ("sm90", "sm100", "sm103") else ""
        return f"TensorRT-RTX cannot build for target {target!r}; it builds for {', '.join(self.targets)}{hopper}"


def flavor(name: str) -> Flavor:
    """Return a flavor of TensorRT, importing it on the first call.

    Args:
        name: ``"rtx"`` (builds with no GPU) or ``"tensorrt"`` (all data-centre GPUs; builds on the GPU itself).

    Raises:
        ConfigError: no such flavor, or ``tensorrt`` on a machine with no GPU.
        MissingDependencyError: it is not installed; the message says how to install it.
    """
    if name not in _IMPORTS:
        raise ConfigError(f"there is no flavor {name!r}; choose one of {', '.join(_IMPORTS)}")
    with _import_lock:
        return _IMPORTS[name]()


@functools.cache
def _rtx() -> Flavor:
    make_findable()
    module = _import(
        "tensorrt_rtx_bindings",
        'TensorRT-RTX is not installed; install it with `pip install "trt-zoo[rtx]"` (Linux x86-64, no GPU needed)',
    )
    members = (value for name, value in module.ComputeCapability.__members__.items() if name.startswith("SM"))
    targets = tuple(f"sm{number}" for number in sorted(int(member.value) for member in members))
    return Flavor("rtx", module, module.__version__, targets, ("sm89", "sm120"), needs_gpu=False)


@functools.cache
def _tensorrt() -> Flavor:
    module = _import(
        "tensorrt",
        'TensorRT is not installed; install it on the target GPU\'s machine with `pip install "trt-zoo[tensorrt]"`, '
        "which fetches over 2 GB from NVIDIA's own package index (see its installation guide); it builds only on the "
        "GPU that will run the engine. To build with no GPU use --flavor rtx",
    )
    capability = present_gpu()
    if capability is None:
        raise ConfigError(
            "the tensorrt flavor builds on the GPU that will run the engine, and this machine has none; "
            "build there, or use --flavor rtx, which needs no GPU"
        )
    return Flavor("tensorrt", module, module.__version__, (capability,), (capability,), needs_gpu=True)


def _import(module: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(remedy) from error
    except (ImportError, OSError) as error:
        raise MissingDependencyError(f"{module} is installed but does not load ({error}). {remedy}") from error


_IMPORTS = {"rtx": _rtx, "tensorrt": _tensorrt}
_import_lock = threading.Lock()
