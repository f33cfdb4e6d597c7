"""One budget for every part: wall-clock seconds, or counted work that repeats."""

from __future__ import annotations

import time


class Clock:
    """Seconds left of ``limit_s``; ``deterministic`` counts only what is charged."""

    def __init__(self, limit_s: float, deterministic: bool) -> None:
        self.deterministic = deterministic
        self._limit_s = limit_s
        self._start = time.perf_counter()
        self._charged = 0.0

    def charge(self, work_s: float) -> None:
        """Adds estimated (deterministic) seconds of work."""
        self._charged += work_s

    def spent(self) -> float:
        if self.deterministic:
            return self._charged
        return time.perf_counter() - self._start

    def left(self) -> float:
        return self._limit_s - self.spent()
