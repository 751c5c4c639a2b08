"""What a person sees of a running training, and how one stops it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def stop_after_this_step() -> Iterator[threading.Event]:
    """Turn SIGINT and SIGTERM into a flag, so that the running step is finished and a checkpoint written."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in previous:
            signal.signal(number, lambda *_: stop.set())
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_SECONDS_A_LINE = 30.0


@contextmanager
def bar(steps: int, done: int, show: bool) -> Iterator[Any]:
    """Yield ``tell(step, text)``: a progress bar on a terminal; elsewhere a line every tenth or half minute."""
    console = Console(stderr=True)
    if show and done:
        print(f"  going on from step {done}/{steps}", file=sys.stderr)
    if not show:
        yield lambda step, text: None
    elif not console.is_terminal:
        every = max(1, steps // 10)
        told, at = done // every, time.monotonic()

        def line(step: int, text: str) -> None:
            nonlocal told, at
            if step // every > told or step == steps or time.monotonic() - at > _SECONDS_A_LINE:
                told, at = step // every, time.monotonic()
                print(f"  step {step}/{steps}  {text}", file=sys.stderr)

        yield line
    else:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as shown:
            task = shown.add_task("starting", total=steps, completed=done)
            yield lambda step, text: shown.update(task, completed=step, description=text)
