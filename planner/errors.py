"""The one exception type of the public API."""

from __future__ import annotations


class PlannerError(Exception):
    """A user's mistake: ``what``, the ``value`` and the ``fix``. Exit code 2.

    ``status``: one word for programs, beside the exit code: ``bad_input``,
    ``unsupported_gpu``, ``does_not_fit`` or ``limit_unreachable``.
    """

    exit_code = 2
    default_status = "bad_input"

    def __init__(
        self, what: str, value: object = None, fix: str = "", *, status: str = ""
    ) -> None:
        self.what, self.value, self.fix = what, value, fix
        self.status = status or self.default_status
        shown = "" if value is None else f": {value}"
        super().__init__(f"{what}{shown}" + (f". {fix}" if fix else ""))


class InfeasibleError(PlannerError):
    """No plan fits: ``what`` says by how many bytes and where. Exit code 3."""

    exit_code = 3
    default_status = "does_not_fit"
