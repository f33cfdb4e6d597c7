"""A plot of predicted against measured times, as SVG: no plotting library needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

SIDE, MARGIN = 640, 60
COLOURS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2",
    "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip

Point = tuple[str, float, float]  # group, predicted, measured


def scatter(points: Sequence[Point], title: str, unit: str = "s") -> str:
    """SVG text: measured across, predicted up, both logarithmic, a line where they
    agree and thin ones 10 % off. ``points`` must be positive."""
    values = [v for _, *pair in points for v in pair]
    low = math.floor(math.log10(min(values, default=1e-3)))
    high = max(low + 1, math.ceil(math.log10(max(values, default=1.0))))
    width = SIDE + 2 * MARGIN + 180

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * SIDE

    def xy(measured: float, predicted: float) -> tuple[float, float]:
        return MARGIN + at(measured), MARGIN + SIDE - at(predicted)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{SIDE + 2 * MARGIN}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="16">{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        x, y = xy(10**power, 10**power)
        grid = 'stroke="#dddddd"'
        parts += [
            f'<path d="M{x:.1f} {MARGIN}V{MARGIN + SIDE}" {grid}/>',
            f'<path d="M{MARGIN} {y:.1f}H{MARGIN + SIDE}" {grid}/>',
            f'<text x="{x - 12:.1f}" y="{MARGIN + SIDE + 18}">1e{power}</text>',
            f'<text x="{MARGIN - 40}" y="{y + 4:.1f}">1e{power}</text>',
        ]
    for factor, dash in ((1.0, ""), (1.1, "4 4"), (1 / 1.1, "4 4")):
        (x0, y0), (x1, y1) = (
            xy(10**low, factor * 10**low),
            xy(10**high, factor * 10**high),
        )
        parts.append(
            f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="black" '
            f'stroke-dasharray="{dash}" stroke-width="0.7"/>'
        )
    names = sorted({name for name, *_ in points})
    for k, name in enumerate(names):
        colour = COLOURS[k % len(COLOURS)]
        parts.append(
            f'<text x="{SIDE + MARGIN + 14}" y="{MARGIN + 14 + 15 * k}" '
            f'fill="{colour}">{escape(name)}</text>'
        )
        for group, predicted, measured in points:
            if group == name:
                x, y = xy(measured, predicted)
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}" '
                    'fill-opacity="0.6"/>'
                )
    parts += [
        f'<text x="{MARGIN + SIDE / 2 - 40}" y="{SIDE + 2 * MARGIN - 12}">'
        f"measured [{unit}]</text>",
        f'<text transform="translate(16 {MARGIN + SIDE / 2}) rotate(-90)">'
        f"predicted [{unit}]</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def save(path: Path, points: Sequence[Point], title: str) -> None:
    """Writes the plot; points without a positive price are left out."""
    good = [p for p in points if p[1] > 0 and p[2] > 0]
    path.write_text(scatter(good, title), encoding="utf-8")
