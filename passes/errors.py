"""The one error that the passes raise for a user's model."""

from __future__ import annotations


class PassError(Exception):
    """A model that can not be traced or lowered: what, the value, what to do."""

    def __init__(self, what: str, value: object = None, fix: str = "") -> None:
        self.what, self.value, self.fix = what, value, fix
        shown = "" if value is None else f": {value}"
        super().__init__(f"{what}{shown}" + (f". {fix}" if fix else ""))
