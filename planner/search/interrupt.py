"""Ctrl-C during a search: the first one ends it with the best plan so far."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """``asked``: the user wants what there is. Without a first plan, and at a second
    Ctrl-C, KeyboardInterrupt is raised at once."""

    def __init__(self) -> None:
        self.asked = False
        self.has_plan = False

    @property
    def now(self) -> bool:
        """Whether to end the search here."""
        return self.asked and self.has_plan

    def handle(self, _signal: int, _frame: FrameType | None) -> None:
        """The signal's handler."""
        if self.asked or not self.has_plan:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stopping() -> Generator[Stop]:
    """Takes over Ctrl-C while the search runs, in the main thread only (Python lets no
    other thread install handlers)."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # the application has its own
        yield stop
        return
    signal.signal(signal.SIGINT, stop.handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
