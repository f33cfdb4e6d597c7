"""Short notations of the plan: number ranges, layer wildcards, placements.

* ``"0-3,5"`` is the numbers 0, 1, 2, 3, 5;
* ``"layers.*.attn.weight"`` with layers ``"0-95"`` is that name in each layer;
* ``"R"``, ``"P(sum)"``, ``"S(0)"``, ``"S(1;3x)"`` (3 equal parts, a share of each) and
  ``"S(1;4096,1024,1024)"`` (unequal parts) place a tensor on one mesh axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from planner.errors import PlannerError
from planner.search.placements import PARTIAL, REPLICATED, Placement

_PLACEMENT = re.compile(r"S\((\d+)(?:;(?:(\d+)x|(\d+(?:,\d+)*)))?\)")


def parse_placement(text: str) -> Placement:
    """The :class:`Placement` that ``str()`` wrote; PlannerError if it is none."""
    if text == "R":
        return REPLICATED
    if text == "P(sum)":
        return PARTIAL
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise PlannerError("not a placement", repr(text), "use R, S(dim) or P(sum)")
    axis, outer, parts = match.groups()
    return Placement(
        "S",
        int(axis),
        int(outer) if outer else 1,
        tuple(int(p) for p in parts.split(",")) if parts else (),
    )


def placement_error(
    text: str, shape: Sequence[int], size: int, padded: bool = False
) -> str | None:
    """Why a tensor of ``shape`` can not lie as ``text`` on ``size`` ranks, or None."""
    try:
        placement = parse_placement(text)
    except PlannerError as error:
        return str(error)
    if placement.kind != "S":
        return None
    if placement.axis >= len(shape):
        return f"{text} names dim {placement.axis} of a {len(shape)}-dim tensor"
    extent = shape[placement.axis]
    if placement.parts and sum(placement.parts) != extent:
        return f"{text}: the parts add up to {sum(placement.parts)}, not to {extent}"
    if extent % placement.outer:
        return f"{text}: {extent} is not {placement.outer} equal parts"
    parts = placement.parts or (extent // placement.outer,)
    if not padded and any(part % size for part in parts):
        return f"{text}: {parts[0] if len(parts) == 1 else parts} over {size} ranks"
    return None


def local_elements(text: str, shape: Sequence[int], size: int) -> float:
    """The share of a tensor, 0 to 1, that a rank stores (padding included)."""
    placement = parse_placement(text)
    if placement.kind != "S" or not shape[placement.axis]:
        return 1.0
    extent = shape[placement.axis]
    parts = placement.parts or (extent // placement.outer,) * placement.outer
    return sum(-(-part // size) for part in parts) / extent


def format_range(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def parse_range(text: str) -> tuple[int, ...]:
    """The numbers of ``"0-2,5"``, ascending; PlannerError if it is no range."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            raise PlannerError("not a range of numbers", repr(text), 'e.g. "0-95"')
        first, last = int(match[1]), int(match[2] or match[1])
        numbers.extend(range(first, last + 1))
    if not numbers or any(b <= a for a, b in pairwise(numbers)):
        raise PlannerError("not an ascending range of numbers", repr(text))
    return tuple(numbers)


def wildcard(names: Iterable[str]) -> dict[str, list[int]]:
    """Groups names that differ in their first whole-number part.

    ``layers.0.w, layers.1.w`` gives ``{"layers.*.w": [0, 1]}``; a name without a
    number stands alone with an empty list.
    """
    groups: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, p in enumerate(parts) if p.isdigit()), None)
        if at is None:
            groups.setdefault(name, [])
        else:
            key = ".".join([*parts[:at], "*", *parts[at + 1 :]])
            groups.setdefault(key, []).append(int(parts[at]))
    return groups


def expand(pattern: str, layers: str | None) -> tuple[str, ...]:
    """Every name that ``pattern`` stands for; ``layers`` None: the name itself."""
    if layers is None:
        return (pattern,)
    return tuple(pattern.replace("*", str(n), 1) for n in parse_range(layers))
