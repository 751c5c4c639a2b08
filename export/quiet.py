"""Silence for torch's exporter: its warnings concern its own internals; its errors still come through."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_TALKATIVE = ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir")


@contextmanager
def quiet() -> Iterator[None]:
    """Hide Python warnings and log records below ERROR of the export machinery."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
