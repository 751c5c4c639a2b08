"""What a person sees of a running training, and how one stops it."""

from __future__ import annotations

import signal
import sys
import threading
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


@contextmanager
def bar(steps: int, done: int, show: bool) -> Iterator[Any]:
    """Yield ``tell(step, text)``: a progress bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True)
    if not show:
        yield lambda step, text: None
    elif not console.is_terminal:
        every = max(1, steps // 10)
        told = done // every

        def line(step: int, text: str) -> None:
            nonlocal told
            if step // every > told or step == steps:
                told = step // every
                print(f"  step {step}/{steps}  {text}", file=sys.stderr)

        yield line
    else:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as shown:
            task = shown.add_task("starting", total=steps, completed=done)
            yield lambda step, text: shown.update(task, completed=step, description=text)
