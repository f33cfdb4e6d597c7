"""The one error that the cost models raise for a user's input."""

from __future__ import annotations


class SpecError(Exception):
    """Hardware or a quantity that can not be priced: what, the value, what to do."""

    def __init__(self, what: str, value: object = None, fix: str = "") -> None:
        self.what, self.value, self.fix = what, value, fix
        shown = "" if value is None else f": {value}"
        super().__init__(f"{what}{shown}" + (f". {fix}" if fix else ""))
