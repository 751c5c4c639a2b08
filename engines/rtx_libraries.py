"""Make the libraries of the TensorRT-RTX wheels find each other.

The ONNX parser opens ``libtensorrt_rtx.so`` by that name when it imports a plugin. The wheel ships only
``libtensorrt_rtx.so.1``, and the parser ends the process when it finds nothing. The parser's RPATH is its own folder,
which the dynamic linker takes from the path that the parser was loaded by, symlinks not resolved. So the parser is
loaded, before anything else loads it, through a symlink in a cache folder that holds a ``libtensorrt_rtx.so`` too.
Nothing is written beside the installed libraries, and no environment variable is needed.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from zoo.errors import ConfigError
from zoo.files import cache_folder

_CORE = "libtensorrt_rtx.so"
_CORE_SHIPPED = "libtensorrt_rtx.so.1"
_PARSER = "libtensorrt_onnxparser_rtx.so.1"


def make_findable(libraries: Path | None = None) -> None:
    """Load the parser so that it finds ``libtensorrt_rtx.so``; call before the bindings are imported.

    Does nothing where there are no wheels' libraries, or where the library has that name already.

    Args:
        libraries: folder of the libraries; by default that of the installed ``tensorrt_rtx_libs``.

    Raises:
        ConfigError: something loaded the parser before, and no symlink can be put beside it.
    """
    folder = libraries or installed_folder()
    if folder is None or not (folder / _CORE_SHIPPED).exists() or (folder / _CORE).exists():
        return
    loaded = _loaded_parser()
    if loaded is None:
        ctypes.CDLL(str(_link_folder(folder) / _PARSER))
    elif not (loaded.parent / _CORE).exists():
        try:
            _link(loaded.parent / _CORE, folder / _CORE_SHIPPED)
        except OSError as error:
            raise ConfigError(
                f"tensorrt_rtx_bindings was imported before engines.flavors, and {loaded.parent} cannot be written "
                f"({error.strerror}); import engines.flavors first"
            ) from error


def installed_folder() -> Path | None:
    """Return the folder of the ``tensorrt_rtx_libs`` wheel, without importing it; None where it is not installed."""
    found = importlib.util.find_spec("tensorrt_rtx_libs")
    return Path(found.origin).resolve().parent if found and found.origin else None


def _link_folder(libraries: Path) -> Path:
    """Return a folder with the symlinks: in the cache if it can be written, else one for this process alone."""
    key = hashlib.sha256(str(libraries).encode()).hexdigest()[:16]
    try:
        return _filled(cache_folder() / "tensorrt-rtx" / key, libraries)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        private = Path(tempfile.mkdtemp(prefix="trt-zoo-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return _filled(private, libraries)


def _filled(folder: Path, libraries: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _link(folder / _PARSER, libraries / _PARSER)
    _link(folder / _CORE, libraries / _CORE_SHIPPED)
    return folder


def _link(link: Path, target: Path) -> None:
    """Make ``link`` a symlink to ``target``; other threads and processes may do the same at the same time."""
    if link.is_symlink() and link.readlink() == target:
        return
    temporary = Path(tempfile.mktemp(prefix=f".{link.name}.", dir=link.parent))
    temporary.symlink_to(target)
    temporary.replace(link)


def _loaded_parser() -> Path | None:
    """Return the path by which this process has the parser, from the dynamic linker's own list."""
    if not _mapped(_PARSER):
        return None
    find = ctypes.CDLL(None).dlinfo
    handle = ctypes.CDLL(_PARSER)._handle  # by its SONAME: the library that is loaded already
    link_map = ctypes.c_void_p()
    get_link_map = 2  # RTLD_DI_LINKMAP
    find(ctypes.c_void_p(handle), get_link_map, ctypes.byref(link_map))
    assert link_map.value is not None
    name = ctypes.c_char_p.from_address(link_map.value + ctypes.sizeof(ctypes.c_void_p)).value
    return Path(os.fsdecode(name or b""))


def _mapped(library: str) -> bool:
    with Path("/proc/self/maps").open() as maps:
        return any(line.rstrip().endswith("/" + library) for line in maps)
