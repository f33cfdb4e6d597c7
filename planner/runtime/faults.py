"""One clear message where another rank died, hangs or runs something else."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist

from planner.errors import PlannerError

_COMMUNICATION = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|socket|broken pipe",
    re.IGNORECASE,
)
_SLOW = re.compile(r"timed? ?out", re.IGNORECASE)


@contextmanager
def guarded() -> Generator[None]:
    """Turns a failed exchange with another rank into a PlannerError."""
    try:
        yield
    except PlannerError:
        raise
    except RuntimeError as error:
        if not _COMMUNICATION.search(str(error)):
            raise
        rank = dist.get_rank() if dist.is_initialized() else "?"
        slow = bool(_SLOW.search(str(error)))
        what = "another rank does not answer" if slow else "another rank has stopped"
        raise PlannerError(
            what,
            f"seen by rank {rank}: {str(error).splitlines()[0][:200]}",
            "look for the first rank that failed in the logs, and start all again",
        ) from error
