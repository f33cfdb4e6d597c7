"""Lightning: a Trainer in Python (DDP, FSDP, or FSDP2 with tensor parallelism)."""

from __future__ import annotations

from planner.errors import PlannerError
from planner.export.accelerate import refuse_stages
from planner.export.base import Export, Facts, Gap, present
from planner.plan import Plan

PRECISIONS = {
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "fp8": "transformer-engine",
    "tf32": "32-true",
    "fp32": "32-true",
}


def lightning(plan: Plan) -> Export:
    """``trainer.py`` with ``trainer()`` and the loader's ``BATCH_SIZE``."""
    facts = Facts.of(plan)
    refuse_stages(facts, "Lightning")
    p, f, gaps = facts.p, facts.figures, list[Gap]()
    for name, size in (("cp", p.cp), ("ep", p.ep)):
        if size > 1:
            raise PlannerError(
                f"Lightning has no {name} in its strategies",
                f"{name}={size}: not expressible",
                f"plan again with --pin {name}=1, or export to megatron or torchtitan",
            )
    strategy, imports = _strategy(facts, gaps)
    if facts.training.precision == "tf32":
        gaps.append(
            Gap("tf32 in the Trainer", "set_float32_matmul_precision('high') is called")
        )
    lines = [
        '"""Trainer of a plan for Lightning; README.txt says what it can not."""',
        "",
        "import lightning as L",
        *imports,
        "",
        f"BATCH_SIZE = {f.micro_batch}  # of the data loader, per rank",
        "",
        "",
        "def trainer(**more):",
        "    return L.Trainer(",
        '        accelerator="gpu",',
        f"        devices={facts.gpus_per_node},",
        f"        num_nodes={facts.nodes},",
        f"        strategy={strategy},",
        f"        accumulate_grad_batches={f.accumulation},",
        f'        precision="{PRECISIONS[facts.training.precision]}",',
        "        **more,",
        "    )",
    ]
    if facts.training.precision == "tf32":
        at = lines.index("import lightning as L")
        lines[at + 1 : at + 1] = ["import torch", "", 'torch.set_float32_matmul_precision("high")']  # noqa: E501  # fmt: skip
    return Export(
        "lightning",
        (("trainer.py", "\n".join(lines) + "\n"),),
        f,
        tuple(gaps),
        (),
        "python train.py  # on every node, or through your scheduler",
    )


def _strategy(facts: Facts, gaps: list[Gap]) -> tuple[str, list[str]]:
    p, modes, total = facts.p, facts.modes(), len(facts.layers)
    recomputed = total - modes.get("none", 0)
    if p.tp > 1:
        gaps.append(
            Gap(
                "the placement of each tensor",
                "write it in the module's configure_model over self.device_mesh",
            )
        )
        if recomputed:
            gaps.append(
                Gap(
                    f"recompute of {recomputed} of {total} layers",
                    "do it in the module",
                )
            )
        if p.zero < 3 and p.dp_shard > 1:
            gaps += present(
                facts.state_gap(3, "fully_shard in configure_model divides")
            )
        strategy = (
            "ModelParallelStrategy("
            f"data_parallel_size={p.data_parallel}, tensor_parallel_size={p.tp})"
        )
        return strategy, [
            "from lightning.pytorch.strategies import ModelParallelStrategy"
        ]
    if p.dp_shard == 1:
        if recomputed:
            gaps.append(
                Gap(
                    f"recompute of {recomputed} of {total} layers",
                    "do it in the module",
                )
            )
        return '"ddp"', []
    kind = "FULL_SHARD" if p.zero == 3 else "SHARD_GRAD_OP"
    options: list[str] = []
    if p.dp_replicate > 1:
        kind = "HYBRID_SHARD" if p.zero == 3 else "_HYBRID_SHARD_ZERO2"
        options.append(f"device_mesh=({p.dp_replicate}, {p.dp_shard})")
    if p.zero < 2:
        gaps += present(facts.state_gap(2, f"FSDP's {kind} divides gradients too"))
    if recomputed:
        gaps.append(
            Gap(
                f"recompute of {recomputed} of {total} layers",
                "give activation_checkpointing_policy your layer class",
            )
        )
    call = ", ".join([f'sharding_strategy="{kind}"', *options])
    return f"FSDPStrategy({call})", [
        "from lightning.pytorch.strategies import FSDPStrategy"
    ]
