"""Predicted against measured time of convolutional and vision models: ``train_vision``.

Models are torchvision's and timm's under the names of the rows; single GPUs run eager
or compiled code, training on several GPUs sums gradients under backward (DDP).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.accuracy_train import rank_correlation
from benchmarks.row_models import Graphs, ModelSpec
from benchmarks.rows import Row, SkipRowError
from cost_models.errors import SpecError
from cost_models.hardware import parse_cluster
from cost_models.stacks import load_stack
from passes.errors import PassError
from planner.api import price_configuration
from planner.errors import PlannerError
from planner.search.job import Job
from planner.workload import Parallelism

#: Names of the rows' models in torchvision and timm, where they differ.
NAMES = {
    "resnet50": "torchvision:resnet50",
    "resnext101-32x4d": "timm:resnext101_32x4d",
    "efficientnet-b0": "timm:efficientnet_b0",
    "efficientnet-widese-b0": "timm:efficientnet_b0",
    "efficientnet-b4": "timm:efficientnet_b4",
    "efficientnet-widese-b4": "timm:efficientnet_b4",
    "se-resnext101-32x4d": "timm:seresnext101_32x4d",
    "xception": "timm:legacy_xception",
}
#: What has no module in either library.
UNKNOWN = ("ssd", "mask", "nnu", "efficientdet", "retina")
GPUS = {
    "rtx3090": "RTX3090",
    "rtx4090": "RTX4090",
    "4090": "RTX4090",
    "5090": "RTX5090",
    "pro6000maxq": "RTXPRO6000MAXQ",
}


@dataclass(frozen=True, slots=True)
class VisionCase:
    """One row: images through one model on equal GPUs."""

    id: str
    source: str
    quality: str
    spec: ModelSpec
    train: bool
    gpu: str
    num_gpus: int
    batch: int
    precision: str
    stack: str
    channels_last: bool
    measured_s: float


@dataclass(frozen=True, slots=True)
class VisionResult:
    """A priced row."""

    case: VisionCase
    source: str
    predicted_s: float
    measured_s: float


def case_of(row: Row) -> VisionCase:
    """Raises SkipRowError with the reason."""
    model = row["model"].lower()
    if any(word in model for word in UNKNOWN):
        raise SkipRowError(f"{row['model']}: detection or segmentation, no module")
    gpu, _, compiler = row["gpu"].partition("-")
    compiled = compiler == "dynamo"
    name = GPUS.get(gpu, row["gpu"].removesuffix("-dynamo"))
    precision = row["precision"].removesuffix("-amp")
    batch, gpus = int(float(row["batch_per_gpu"])), int(float(row["num_gpus"]))
    measured = batch * gpus / float(row["images_per_s"])
    nvidia = "DeepLearningExamples" in row["source"]
    train = row["task"].startswith("train")
    stack = "vision-dle" if nvidia and train else "vision-eager"
    spec = ModelSpec(
        "vision", 0, 0, 0, 0, 0, 0,
        seq_len=int(float(row["image_size"] or 224)),
        dtype={"tf32": "fp32"}.get(precision, precision),
        name=NAMES.get(model, f"timm:{row['model']}"),
    )  # fmt: skip
    return VisionCase(
        id=row["id"],
        source=row["source"].split(" (")[0],
        quality=row["quality"] or "A",
        spec=spec,
        train=train,
        gpu=name,
        num_gpus=gpus,
        batch=batch,
        precision=precision,
        stack="vision-compiled" if compiled else stack,
        channels_last=row["memory_format"] != "nchw" and precision != "fp32",
        measured_s=measured,
    )


def job_of(case: VisionCase, graphs: Graphs) -> Job:
    """The priced model of a row."""
    stack = replace(load_stack(case.stack), channels_last=case.channels_last)
    cluster = parse_cluster(
        {"gpu": case.gpu, "num_gpus": case.num_gpus, "gpus_per_node": case.num_gpus}
    )
    return Job(
        graphs.get(case.spec, case.train),
        cluster,
        stack,
        precision=case.precision,
        optimizer="momentum",
        training=case.train,
    )


def shape_of(case: VisionCase) -> Parallelism:
    """Data parallelism of whole replicas."""
    shape = Parallelism(dp_replicate=case.num_gpus, micro_batch_size=case.batch)
    return shape.derive(case.batch * case.num_gpus)


def figures(results: Sequence[VisionResult]) -> dict[str, Any]:
    """Errors of step times; rank correlation over all rows of the group."""
    if not results:
        return {"n": 0}
    predicted = np.array([r.predicted_s for r in results])
    measured = np.array([r.measured_s for r in results])
    error = predicted / measured - 1
    ape = np.abs(error)
    rank = rank_correlation(predicted, measured)
    return {
        "n": len(results),
        "mape": round(float(ape.mean()), 4),
        "median_ape": round(float(np.median(ape)), 4),
        "p90_ape": round(float(np.quantile(ape, 0.9)), 4),
        "bias": round(float(np.median(error)), 4),
        **({} if rank is None else {"rank_correlation": round(rank, 4)}),
    }


def evaluate(
    rows: Sequence[Row], graphs: Graphs
) -> tuple[dict[str, Any], list[VisionResult]]:
    """The document of the table and its priced rows (quality A and B)."""
    results: list[VisionResult] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            case = case_of(row)
            priced = price_configuration(job_of(case, graphs), shape_of(case))
        except SkipRowError as reason:
            skipped[str(reason)] += 1
            continue
        except (PlannerError, SpecError, PassError) as error:
            skipped[f"{row['model']}: {error.what}"] += 1
            continue
        if case.quality in ("A", "B"):
            seconds = priced.terms.total_s
            results.append(VisionResult(case, case.source, seconds, case.measured_s))
    groups: dict[str, list[VisionResult]] = defaultdict(list)
    for r in results:
        kind = "training" if r.case.train else "inference"
        for name in (r.source, f"{r.source}: {kind}", f"gpu:{r.case.gpu}"):
            groups[name].append(r)
    return {
        **figures(results),
        "skipped": [f"{n} x {why}" for why, n in sorted(skipped.items())],
        "by_group": {name: figures(part) for name, part in sorted(groups.items())},
    }, results


def worst(results: Sequence[VisionResult], count: int = 20) -> list[dict[str, Any]]:
    """The rows that are furthest off."""
    chosen = sorted(results, key=lambda r: -abs(r.predicted_s / r.measured_s - 1))
    return [
        {
            "id": r.case.id,
            "group": r.source,
            "what": f"{r.case.spec.name} at {r.case.spec.seq_len} on {r.case.gpu}, "
            f"batch {r.case.batch}, {r.case.precision}, {r.case.stack}",
            "measured_s": r.measured_s,
            "predicted_s": r.predicted_s,
        }
        for r in chosen[:count]
    ]
