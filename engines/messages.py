"""TensorRT's log, kept instead of printed, so that an error can carry it."""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any

KEPT = 50
"""Messages kept of each severity; the earliest errors matter most and are never dropped."""

# Said on every machine without a GPU, where the rtx flavor builds all the same.
_HARMLESS = ("CUDA driver version is insufficient", "no CUDA-capable device", "Unable to determine GPU memory")


class Messages:
    """Errors and warnings since ``clear``. TensorRT calls from threads of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.errors: list[str] = []
        self.warnings: deque[str] = deque(maxlen=KEPT)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self.errors.clear()
            self.warnings.clear()

    def add(self, *, error: bool, message: str) -> None:
        """Keep one message, unless it is one that every machine without a GPU gives."""
        if any(phrase in message for phrase in _HARMLESS):
            return
        with self._lock:
            if not error:
                self.warnings.append(message)
            elif len(self.errors) < KEPT:
                self.errors.append(message)

    def first_errors(self, count: int = 3) -> str:
        """Return the first errors as one line, empty where there are none."""
        with self._lock:
            return "; ".join(" ".join(message.split()) for message in self.errors[:count])


@functools.cache
def logger(trt: Any) -> tuple[Any, Messages]:
    """Return the one logger of a TensorRT module and what it keeps; TensorRT uses the first that it is given."""
    messages = Messages()
    severe = (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR)

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity in severe or severity == trt.ILogger.Severity.WARNING:
                messages.add(error=severity in severe, message=msg)

    return Logger(), messages
