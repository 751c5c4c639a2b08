"""Files that are never half written, their checksums, and folders with one writer. Every package may use it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo.errors import BusyError, ConfigError


def cache_folder() -> Path:
    """Return the folder for downloads and prepared data: ``$TRT_ZOO_CACHE``, or ``~/.cache/trt-zoo``."""
    configured = os.environ.get("TRT_ZOO_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "trt-zoo"


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success fsync it and rename it over ``path``, on failure remove it.

    A reader therefore sees the old file or the whole new one, also when the process is killed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        _fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path | str, data: bytes | memoryview) -> None:
    """Write ``data`` to ``path`` whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path`` whole or not at all."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def make_folder(path: Path | str) -> Path:
    """Make a folder and its parents, and return it.

    Raises:
        ConfigError: something else is in the way, or it may not be written.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made a folder ({error.strerror}); choose another one") from error
    return path


@contextmanager
def one_writer(folder: Path | str, *, lock: str = ".lock", wait: bool = False) -> Iterator[None]:
    """Hold a folder's lock (an empty file in it) while the block runs; the lock ends with the process.

    Raises:
        BusyError: another holder has it, and ``wait`` is false.
    """
    with (make_folder(folder) / lock).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise BusyError(
                f"another process is writing to {folder}; wait until it ends, or choose another folder"
            ) from None
        yield


def sha256_of(path: Path | str) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits, reading it in pieces."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
