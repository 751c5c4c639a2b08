"""Silence for torch's exporter: its notes concern its own internals, and what matters it raises."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO, cast

_LEVELS = {
    "torch.onnx": logging.ERROR,
    "torch.export": logging.CRITICAL,
    "torch.fx": logging.ERROR,
    "onnxscript": logging.ERROR,
    "onnx_ir": logging.ERROR,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings, log records and what this thread prints to standard error; exceptions pass."""
    before = {name: logging.getLogger(name).level for name in _LEVELS}
    try:
        for name, level in _LEVELS.items():
            logging.getLogger(name).setLevel(level)
        # On failure torch.export prints the whole traced graph to standard error. A progress display runs in another
        # thread and must go on.
        with warnings.catch_warnings(), redirect_stderr(cast(TextIO, _SilentInThisThread(sys.stderr))):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


class _SilentInThisThread:
    """A text stream that drops what the thread that made it writes, and passes on everything else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
