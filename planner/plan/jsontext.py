"""Deterministic JSON that diffs well: sorted keys, short containers on one line."""

from __future__ import annotations

import json
from typing import cast

WIDTH = 96


def dumps(value: object) -> str:
    """JSON text of plain data: same value, same bytes; ends with a newline.

    Floats are written by ``repr`` (shortest text that reads back equal). Raises
    ValueError on NaN or infinity, which JSON does not have.
    """
    return _text(value, 0, 0) + "\n"


def _flat(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _text(value: object, indent: int, used: int) -> str:
    flat = _flat(value)
    if len(flat) + indent + used <= WIDTH:
        return flat
    inner, pad = indent + 1, " " * (indent + 1)
    if isinstance(value, dict) and value:
        lines: list[str] = []
        for key, item in sorted(cast("dict[str, object]", value).items()):
            head = f"{pad}{_flat(key)}: "
            lines.append(head + _text(item, inner, len(head) - inner))
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    if isinstance(value, list | tuple) and value:
        items = list(cast("list[object]", value))
        if any(isinstance(item, dict | list | tuple) for item in items):
            body = ",\n".join(pad + _text(item, inner, 0) for item in items)
        else:
            body = _wrap([_flat(item) for item in items], pad)
        return "[\n" + body + "\n" + " " * indent + "]"
    return flat


def _wrap(items: list[str], pad: str) -> str:
    """Scalars, as many to a line as fit."""
    lines: list[str] = []
    line = pad
    for number, item in enumerate(items):
        piece = item + ("," if number + 1 < len(items) else "")
        if line != pad and len(line) + len(piece) + 1 > WIDTH:
            lines.append(line)
            line = pad
        line += piece if line == pad else " " + piece
    return "\n".join([*lines, line])
