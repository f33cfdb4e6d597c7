"""Fit the activation profiles of ``cost_models/specs/memory_profiles.json``.

``python -m benchmarks.fit.fit_memory [--write]`` fits each profile's free constants on
the development rows and prints the error, in sample and held out: two folds by
configuration (model, tp, pp) for nanotron, by test case for Megatron. The loss is
lopsided: a planner that promises too little memory is worse than one that promises too
much, so a shortfall beyond 3 % weighs more than the same excess. Needs scipy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy_memory import (
    DATA,
    CanNotPriceError,
    Case,
    ci_case,
    figures,
    llm_case,
    predict_bytes,
    read_rows,
)
from cost_models.transformer import ActivationProfile, load_activation_profile

SPEC = Path(__file__).parents[2] / "cost_models" / "specs" / "memory_profiles.json"

#: Free constants of nanotron with start and scale. ``gathered`` is that of the profile
#: that gathers again in backward; the last two belong to the one that keeps.
NANOTRON = {
    "attention": (8.0, 4.0),
    "gated_ffn": (7.0, 2.0),
    "loss_peak": (11.0, 3.0),
    "loss_saved": (6.0, 3.0),
    "loss_held": (3.0, 1.0),
    "working_hidden": (60.0, 30.0),
    "working_ffn": (15.0, 10.0),
    "gradient": (2.0, 1.0),
    "workspace_bytes": (2.5e8, 1e8),
    "gathered": (0.2, 0.1),
    "gathered_kept": (2.5, 1.0),
    "loss_gathered": (1.2, 0.5),
}
MEGATRON = {
    "workspace_bytes": (8e7, 3e7),
    "margin": (0.08, 0.03),
}

Key = Callable[[dict[str, str]], str]
Tune = Callable[[ActivationProfile, dict[str, float]], ActivationProfile]


def tune_nanotron(p: ActivationProfile, x: dict[str, float]) -> ActivationProfile:
    """``p`` with the constants ``x``; what is gathered by the profile's own name."""
    free = dict(x)
    kept = free.pop("gathered_kept"), free.pop("loss_gathered")
    if p.name == "nanotron_kept":
        free["gathered"], free["loss_gathered"] = kept
    return replace(p, **free)


def tune_megatron(p: ActivationProfile, x: dict[str, float]) -> ActivationProfile:
    """``p`` with the constants ``x``."""
    return replace(p, **x)


def lopsided(error: np.ndarray) -> np.ndarray:
    """Residuals of log(predicted / measured), saturating at outliers."""
    short = np.tanh((error + 0.02) / 0.10) * 0.50 - 0.02
    return np.where(error < -0.02, short, np.tanh(error / 0.15) * 0.15)


def fit(
    cases: Sequence[Case], free: dict[str, tuple[float, float]], tune: Tune
) -> dict[str, float]:
    """Constants that bring the predictions closest."""
    names = list(free)
    start = np.array([free[n][0] for n in names])
    scale = np.array([free[n][1] for n in names])
    measured = np.array([c.measured_bytes for c in cases])

    def residuals(values: np.ndarray) -> np.ndarray:
        predicted = predictions(cases, dict(zip(names, values, strict=True)), tune)
        return lopsided(np.log(predicted / measured))

    found = least_squares(residuals, start, x_scale=scale, bounds=(0, np.inf))
    return dict(zip(names, map(float, found.x), strict=True))


def predictions(cases: Sequence[Case], x: dict[str, float], tune: Tune) -> np.ndarray:
    """Predicted bytes of every case with the constants ``x``."""
    return np.array(
        [predict_bytes(replace(c, profile=tune(c.profile, x))) for c in cases]
    )


def report(
    name: str,
    cases: Sequence[Case],
    keys: Sequence[str],
    free: dict[str, tuple[float, float]],
    tune: Tune,
) -> tuple[dict[str, float], dict[str, object]]:
    """Fit on all rows; figures in sample and of two held-out folds, printed as well."""
    fold = np.array([crc32(k.encode()) % 2 for k in keys])
    measured = np.array([c.measured_bytes for c in cases])
    held = np.zeros(len(cases))
    for side in (0, 1):
        train = [c for c, f in zip(cases, fold, strict=True) if f != side]
        test = [c for c, f in zip(cases, fold, strict=True) if f == side]
        held[fold == side] = predictions(test, fit(train, free, tune), tune)
    x = fit(cases, free, tune)
    errors: dict[str, object] = {
        "in_sample": figures(predictions(cases, x, tune), measured),
        "held_out": figures(held, measured),
    }
    shown = {k: round(v, 4) for k, v in x.items()}
    print(json.dumps({"profile": name, "constants": shown, **errors}, indent=2))
    return x, errors


def load_cases() -> tuple[list[Case], list[str], list[Case], list[str]]:
    """Cases and fold keys of nanotron and of Megatron."""
    nano: list[Case] = []
    nano_keys: list[str] = []
    for row in read_rows(DATA / "train_llm.csv.gz"):
        if row["config_group"] == "ultrascale" and row["mem_gib_per_gpu"]:
            nano.append(llm_case(row))
            nano_keys.append(f"{row['model']} {row['tp']} {row['pp']}")
    mega: list[Case] = []
    mega_keys: list[str] = []
    for row in read_rows(DATA / "train_megatron_ci.csv.gz"):
        try:
            mega.append(ci_case(row))
        except CanNotPriceError:
            continue
        mega_keys.append(row["test_case"])
    return nano, nano_keys, mega, mega_keys


def main(argv: list[str]) -> None:
    nano, nano_keys, mega, mega_keys = load_cases()
    x, nano_errors = report("nanotron", nano, nano_keys, NANOTRON, tune_nanotron)
    y, mega_errors = report("megatron", mega, mega_keys, MEGATRON, tune_megatron)
    if "--write" not in argv:
        return
    document = json.loads(SPEC.read_text(encoding="utf-8"))
    document["errors"] = {"nanotron": nano_errors, "megatron": mega_errors}
    for name, entry in document["profiles"].items():
        p = load_activation_profile(name)
        if name.startswith("nanotron"):
            p = tune_nanotron(p, x)
            changed = tuple(k for k in x if k != "gathered_kept")
        elif name == "megatron":
            p = tune_megatron(p, y)
            changed = tuple(y)
        else:
            continue
        for key in changed:
            entry[key] = float(f"{getattr(p, key):.4g}")
    SPEC.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
