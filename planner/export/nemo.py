"""NeMo 2: a MegatronStrategy, its DDP config and data sampler, as Python source."""

from __future__ import annotations

from planner.export.base import Export, Facts, Gap
from planner.export.megatron import expert_tensor, layout, megatron
from planner.plan import Plan

#: Keyword arguments of nemo.lightning's MegatronStrategy (NeMo 2.x,
#: nemo/lightning/pytorch/strategies/megatron_strategy.py) that this file may write.
STRATEGY = frozenset(
    """
    tensor_model_parallel_size pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size context_parallel_size sequence_parallel
    expert_model_parallel_size expert_tensor_parallel_size ddp
    pipeline_model_parallel_layout
    """.split()  # noqa: SIM905
)


def nemo(plan: Plan) -> Export:
    """``strategy.py`` with ``strategy()``, ``recompute`` and ``data_sampler()``."""
    base, facts = megatron(plan), Facts.of(plan)
    said: dict[str, str] = {}
    for line in base.text("arguments.txt").splitlines():
        name, _, value = line.partition(" ")
        said[name] = value
    p = facts.p
    kwargs: dict[str, object] = {
        "tensor_model_parallel_size": p.tp,
        "pipeline_model_parallel_size": p.pp,
        "context_parallel_size": p.cp,
        "sequence_parallel": "--sequence-parallel" in said,
    }
    if p.ep > 1:
        kwargs["expert_model_parallel_size"] = p.ep
        kwargs["expert_tensor_parallel_size"] = expert_tensor(plan)
    gaps = list(base.gaps)
    if "--pipeline-model-parallel-layout" in said:
        kwargs["pipeline_model_parallel_layout"] = layout(facts)
    elif "--num-virtual-stages-per-pipeline-rank" in said:
        kwargs["virtual_pipeline_model_parallel_size"] = p.vpp
    assert kwargs.keys() <= STRATEGY
    ddp: dict[str, object] = {
        "use_distributed_optimizer": "--use-distributed-optimizer" in said,
        "overlap_grad_reduce": "--overlap-grad-reduce" in said,
        "overlap_param_gather": "--overlap-param-gather" in said,
        "grad_reduce_in_fp32": "--grad-reduce-in-bf16" not in said,
    }
    if "--use-megatron-fsdp" in said:
        ddp["use_megatron_fsdp"] = True
        strategy = said["--data-parallel-sharding-strategy"]
        ddp["data_parallel_sharding_strategy"] = strategy
    if p.dp_replicate > 1 and "--num-distributed-optimizer-instances" in said:
        ddp["num_distributed_optimizer_instances"] = p.dp_replicate
    recompute: dict[str, object] = {
        name.removeprefix("--").replace("-", "_"): int(v) if v.isdigit() else v
        for name, v in said.items()
        if name.startswith("--recompute")
    }
    plugin = {"bf16": "bf16-mixed", "fp8": "bf16-mixed", "fp16": "16-mixed"}.get(
        facts.training.precision
    )
    if plugin is None:
        gaps.append(
            Gap(
                f"precision {facts.training.precision}",
                "MegatronMixedPrecision names 16-bit formats only; 32-true is written",
            )
        )
        plugin = "32-true"
    source = _source(facts, kwargs, ddp, recompute, plugin)
    return Export(
        "nemo",
        (("strategy.py", source),),
        facts.figures,
        tuple(gaps),
        ("pass `recompute` to the model's config (GPTConfig and relatives)",),
        facts.torchrun("your_recipe.py"),
    )


def _source(
    facts: Facts,
    kwargs: dict[str, object],
    ddp: dict[str, object],
    recompute: dict[str, object],
    plugin: str,
) -> str:
    f = facts.figures

    def call(values: dict[str, object], indent: str) -> str:
        return "".join(f"{indent}{k}={v!r},\n" for k, v in values.items())

    fp8 = ', fp8="hybrid"' if facts.training.precision == "fp8" else ""
    return (
        '"""Strategy of a plan for NeMo 2; see README.txt for what it can not say."""\n'
        "\n"
        "from megatron.core.distributed import DistributedDataParallelConfig\n"
        "from nemo import lightning as nl\n"
        "from nemo.lightning.pytorch.plugins import MegatronDataSampler\n"
        "\n"
        f"#: arguments of the model's config\n"
        f"recompute = {recompute!r}\n"
        "\n\n"
        "def strategy():\n"
        "    return nl.MegatronStrategy(\n"
        f"{call(kwargs, ' ' * 8)}"
        "        ddp=DistributedDataParallelConfig(\n"
        f"{call(ddp, ' ' * 12)}"
        "        ),\n"
        "    )\n"
        "\n\n"
        "def trainer(**more):\n"
        "    return nl.Trainer(\n"
        '        accelerator="gpu",\n'
        f"        devices={facts.gpus_per_node},\n"
        f"        num_nodes={facts.nodes},\n"
        "        strategy=strategy(),\n"
        f'        plugins=nl.MegatronMixedPrecision(precision="{plugin}"{fp8}),\n'
        "        **more,\n"
        "    )\n"
        "\n\n"
        "def data_sampler():\n"
        "    return MegatronDataSampler(\n"
        f"        seq_len={facts.plan.model.seq_len},\n"
        f"        micro_batch_size={f.micro_batch},\n"
        f"        global_batch_size={f.global_batch},\n"
        "    )\n"
    )
