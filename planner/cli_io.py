"""How the command line talks: results, progress, errors and exit codes."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from planner.errors import PlannerError

INTERNAL = 1
BAD_INPUT = 2
INFEASIBLE = 3
CHECK_FAILED = 4
INTERRUPTED = 130
BROKEN_PIPE = 141


@contextmanager
def progress(quiet: bool) -> Generator[Callable[[str], None]]:
    """A status line on stderr, only where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(escape(text))


class ReaderGone(Exception):
    """Nobody reads standard output any more (``planner clusters | head -1``)."""


def show(text: str) -> None:
    """Text on stdout, a newline at its end."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGone from error


def print_json(value: Any) -> None:
    show(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False))


def say(text: str) -> None:
    """One line on stderr."""
    print(" ".join(text.split()), file=sys.stderr)


def guarded(command: Callable[[], int], arguments: Sequence[str]) -> int:
    """Runs ``command`` and returns its exit code; no exception leaves it.

    ``arguments``: what the user typed, to show the value that an option refuses.
    """
    if "PLANNER_TRACEBACK" in os.environ:
        return command()
    warnings.simplefilter("ignore")
    try:
        return command()
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except ReaderGone:
        # keep the interpreter's last flush from complaining
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # the last resort: never a traceback
        return _report(error, arguments)


def _report(error: Exception, arguments: Sequence[str]) -> int:
    """One line for an error, and the exit code that it means."""
    from cost_models.errors import SpecError
    from passes.errors import PassError

    if isinstance(error, PlannerError | SpecError | PassError):
        say(f"error: {error}")
        if "--json" in arguments:
            print_json({"error": _fields(error)})
        return error.exit_code if isinstance(error, PlannerError) else BAD_INPUT
    usage = getattr(error, "format_message", None)  # of typer, or of click before it
    if usage is not None:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(usage(), file=sys.stderr)
        else:
            given = _given(error, arguments)
            say(f"error: {usage()}{given} `planner --help` lists what there is.")
        return BAD_INPUT
    if type(error).__name__ == "Abort":
        say("interrupted")
        return INTERRUPTED
    say(
        f"internal error: {type(error).__name__}: {error} (this is a bug; "
        "PLANNER_TRACEBACK=1 shows where)"
    )
    return INTERNAL


def _fields(error: Any) -> dict[str, Any]:
    """An error for programs: its status, what, value and fix."""
    status = getattr(error, "status", "bad_input")
    if error.what.startswith("unknown GPU") or "matrix units" in error.what:
        status = "unsupported_gpu"
    value = None if error.value is None else str(error.value)
    return {"status": status, "what": error.what, "value": value, "fix": error.fix}


def _given(error: Exception, arguments: Sequence[str]) -> str:
    """What the user typed for the option that a usage error is about."""
    names: Sequence[str] = getattr(getattr(error, "param", None), "opts", ())
    values = [b for a, b in pairwise(arguments) if a in names]
    return f" (given {values[-1]!r})." if values else ""
