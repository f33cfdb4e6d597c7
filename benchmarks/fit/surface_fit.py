"""Least-squares tools for utilisation surfaces: constants, then a smooth correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[np.float64]
Knots = tuple[tuple[float, ...], ...]

#: Log errors below this count quadratically, above linearly: outliers do not steer.
SOFT = 0.05


def fit_constants(
    residual: Callable[[Array], Array],
    start: Array,
    low: Array,
    high: Array,
    evaluations: int = 3000,
    restarts: int = 2,
) -> Array:
    """Constants in [low, high] that make ``residual`` (log errors) small, robustly."""
    lo, hi = np.log(np.maximum(low, 1e-3)), np.log(high)

    def loss(z: Array) -> float:
        inside = np.clip(z, lo, hi)
        r = residual(np.exp(inside))
        outside = float(np.mean((z - inside) ** 2))
        return float(np.mean(np.sqrt(r * r + SOFT**2))) + 0.02 * outside

    z = np.clip(np.log(np.maximum(start, 1e-3)), lo, hi)
    for _ in range(restarts):
        found = minimize(
            loss,
            z,
            method="Nelder-Mead",
            options={"maxfev": evaluations, "adaptive": True, "fatol": 1e-6},
        )
        z = np.clip(found.x, lo, hi)
    return np.exp(z)


def hat(knots: Sequence[float], x: Array) -> Array:
    """Linear interpolation weights of ``x`` on ``knots``, clamped: a row per x."""
    eye = np.eye(len(knots))
    return np.stack([np.interp(x, knots, row) for row in eye], axis=1)


def design(knots: Knots, points: Array) -> Array:
    """Multilinear weights of ``points`` (rows of coordinates) on the row-major grid."""
    out = np.ones((len(points), 1))
    for axis, column in zip(knots, points.T, strict=True):
        out = (out[:, :, None] * hat(axis, column)[:, None, :]).reshape(len(points), -1)
    return out


def roughness(knots: Knots) -> Array:
    """Quadratic form of second differences along each axis (per unit of log2)."""
    shape = [len(a) for a in knots]
    total = np.zeros((int(np.prod(shape)),) * 2)
    for i, axis in enumerate(knots):
        gaps = [b - a for a, b in pairwise(axis)]
        second = np.zeros((len(axis) - 2, len(axis)))
        for j, (g, h) in enumerate(pairwise(gaps)):
            second[j, j : j + 3] = np.array([1 / g, -1 / g - 1 / h, 1 / h])
        parts = [np.eye(s) for s in shape]
        parts[i] = second.T @ second
        form = parts[0]
        for part in parts[1:]:
            form = np.kron(form, part)
        total += form
    return total


def fit_grid(
    knots: Knots,
    points: Array,
    target: Array,
    weight: Array,
    smooth: float,
    ridge: float,
) -> Array:
    """The grid g with design @ g close to ``target``: robust (3 reweightings), smooth,
    and drawn to zero where there are no data."""
    a = design(knots, points)
    penalty = smooth * roughness(knots) + ridge * np.eye(a.shape[1])
    w = weight.copy()
    grid = np.zeros(a.shape[1])
    for _ in range(4):
        grid = np.linalg.solve(a.T @ (w[:, None] * a) + penalty, a.T @ (w * target))
        r = target - a @ grid
        w = weight / np.sqrt(1 + (r / SOFT) ** 2)
    return grid


def errors(predicted: Array, measured: Array) -> dict[str, float]:
    """Median, 90th percentile and mean absolute percentage error, and bias."""
    ape = np.abs(predicted / measured - 1)
    return {
        "n": len(ape),
        "median_ape": round(float(np.median(ape)), 4),
        "p90_ape": round(float(np.quantile(ape, 0.9)), 4),
        "mape": round(float(np.mean(ape)), 4),
        "bias": round(float(np.median(predicted / measured - 1)), 4),
    }
