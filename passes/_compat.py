"""``StrEnum`` for Python 3.10."""

from __future__ import annotations

import sys
from enum import Enum

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum
else:

    class StrEnum(str, Enum):
        """A string that is also an enum member; prints as its value."""

        def __str__(self) -> str:
            return str(self.value)
