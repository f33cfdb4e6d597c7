"""Options that several commands share, as Typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Preset, Hugging Face config file or folder, torchvision:NAME, timm:NAME "
        "or pkg.mod:factory. `planner models` lists the presets.",
    ),
]
Cluster = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", help="64xA100, 8x8xH100, 64xA100@100Gbps, or a YAML file."
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch", help="Samples per step over all GPUs."),
]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", help="Tokens per sample."),
]
ImageSize = Annotated[
    int | None,
    typer.Option("--image-size", help="Pixels along an image's side."),
]
Precision = Annotated[
    str, typer.Option("--precision", help="bf16, fp16, fp32, tf32 or fp8.")
]
OptimizerName = Annotated[
    str, typer.Option("--optimizer", help="adamw, adam, sgd, momentum or lion.")
]
Compile = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Fused pointwise chains.")
]
Stack = Annotated[
    str | None,
    typer.Option("--stack", help="Software profile, e.g. megatron, fsdp."),
]
Im2col = Annotated[
    str,
    typer.Option(
        "--im2col", help="Convolutions: implicit, or materialized patches + GEMM."
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option("--memory-limit", help="Per GPU: GiB, or with a unit (40GB)."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Write the plan to this file."),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse ops without a sharding rule.")
]


def memory_limit_bytes(text: str | None) -> int | None:
    """Bytes of ``--memory-limit``: a bare number is GiB."""
    if text is None:
        return None
    from cost_models.units import parse_bytes

    try:
        return int(float(text) * 2**30)
    except ValueError:
        return int(parse_bytes(text))
