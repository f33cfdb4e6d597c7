"""Each target: what is written, what is said to be missing, what is refused."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from planner.errors import PlannerError
from planner.export import Export, export, targets
from planner.export import accelerate as accelerate_module
from planner.workload import Parallelism
from tests.unit.planner.export.plans import plan_of

TRAINING = ("megatron", "nemo", "torchtitan", "deepspeed", "accelerate", "lightning")

H12 = Parallelism(tp=2, pp=2, dp_shard=4, ep=4, zero=1)


def gaps(found: Export) -> str:
    return " | ".join(map(str, found.gaps))


def arguments(found: Export) -> dict[str, str]:
    lines = found.text("arguments.txt").splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def test_megatron_writes_zero_1_as_the_distributed_optimizer() -> None:
    found = export(plan_of(H12, 64), "megatron")
    said = arguments(found)
    assert "--use-distributed-optimizer" in said
    assert "--use-megatron-fsdp" not in said
    assert said["--expert-model-parallel-size"] == "4"
    assert said["--micro-batch-size"] == "1"
    assert said["--global-batch-size"] == "64"
    degrees = [
        int(said[f"--{name}-size"])
        for name in ("tensor-model-parallel", "pipeline-model-parallel")
    ]
    assert degrees == [2, 2]  # world 16 = 2 x 2 x dp 4: ep is no factor of it
    assert found.figures.world == 16
    assert "ZeRO" not in gaps(found)


def test_torchtitan_says_that_zero_1_is_not_expressible() -> None:
    found = export(plan_of(H12, 64), "torchtitan")
    table = tomllib.loads(found.text("job.toml"))["parallelism"]
    assert "not expressible: ZeRO-1" in gaps(found)
    assert "GiB less per GPU" in gaps(found)
    assert table["data_parallel_shard_degree"] == 4
    assert table["expert_parallel_degree"] == 4
    assert table["fsdp_reshard_after_forward"] == "never"
    assert "# not expressible: ZeRO-1" in found.text("job.toml")


def test_deepspeed_writes_stage_1_and_names_what_code_must_do() -> None:
    found = export(plan_of(H12, 64), "deepspeed")
    config = json.loads(found.text("ds_config.json"))
    assert config["zero_optimization"]["stage"] == 1
    assert config["train_batch_size"] == 64
    assert "PipelineModule(num_stages=2)" in gaps(found)
    assert "ep_size=4" in gaps(found)


@pytest.mark.parametrize(
    ("count", "megatron_runs", "torch_runs"),
    [(8, True, True), (12, True, True)],
)
def test_interleaving_that_both_run(
    count: int, megatron_runs: bool, torch_runs: bool
) -> None:
    plan = plan_of(Parallelism(pp=4, vpp=2, dp_replicate=2), 2 * count)
    assert megatron_runs == (
        "--global-batch-size" in arguments(export(plan, "megatron"))
    )
    toml = export(plan, "torchtitan").text("job.toml")
    assert torch_runs == ("Interleaved1F1B" in toml)


@pytest.mark.parametrize(
    ("count", "torch_runs"),
    [(3, True), (9, False), (10, True), (11, False)],
)
def test_interleaving_that_megatron_refuses(count: int, torch_runs: bool) -> None:
    """10 micro-batches on 4 stages: torch runs them, Megatron does not."""
    good = plan_of(Parallelism(pp=4, vpp=2, dp_replicate=2), 16)
    shape = good.parallelism
    object.__setattr__(shape, "num_micro_batches", count)
    training = good.workload
    object.__setattr__(training, "global_batch", 2 * count)
    with pytest.raises(PlannerError, match=r"Megatron refuses .*multiple of 8"):
        export(good, "megatron")
    if torch_runs:
        assert export(good, "torchtitan").figures.accumulation == count
    else:
        with pytest.raises(PlannerError, match="torchtitan refuses"):
            export(good, "torchtitan")


def test_1f1b_in_torch_needs_as_many_micro_batches_as_stages() -> None:
    plan = plan_of(Parallelism(pp=4, dp_replicate=2), 4)
    assert export(plan, "megatron").figures.accumulation == 2
    for target in ("torchtitan", "dtensor"):
        with pytest.raises(PlannerError, match="refuses the plan's schedule"):
            export(plan, target)


def test_uneven_stages_become_a_layout() -> None:
    plan = plan_of(Parallelism(pp=4, dp_replicate=2), 16, layers=22)
    assert arguments(export(plan, "megatron"))["--pipeline-model-parallel-layout"] == (
        "Et*6|t*6|t*5|t*5L"
    )
    parts = tomllib.loads(export(plan, "torchtitan").text("job.toml"))["parallelism"]
    assert [len(p) for p in parts["module_fqns_per_model_part"]] == [7, 6, 5, 7]


def test_even_stages_need_no_layout() -> None:
    said = arguments(export(plan_of(Parallelism(pp=4, vpp=3), 16), "megatron"))
    assert said["--num-virtual-stages-per-pipeline-rank"] == "3"
    assert "--pipeline-model-parallel-layout" not in said


@pytest.mark.parametrize(
    ("zero", "strategy"), [(2, "optim_grads"), (3, "optim_grads_params")]
)
def test_megatron_fsdp_levels(zero: int, strategy: str) -> None:
    plan = plan_of(Parallelism(dp_shard=8, zero=zero), 16)
    said = arguments(export(plan, "megatron"))
    assert said["--data-parallel-sharding-strategy"] == strategy


def test_a_level_that_stages_do_not_allow_says_its_bytes() -> None:
    plan = plan_of(Parallelism(pp=2, dp_shard=4, zero=3), 16)
    found = export(plan, "megatron")
    memory = plan.stages[0].memory
    extra = 3 * (memory.gradients_bytes + memory.parameters_bytes) / 2**30
    assert f"about {extra:.1f} GiB more per GPU" in gaps(found)


def test_hybrid_sharding() -> None:
    plan = plan_of(Parallelism(dp_replicate=2, dp_shard=4, zero=3), 16)
    said = arguments(export(plan, "megatron"))
    assert said["--num-distributed-optimizer-instances"] == "2"
    text = export(plan, "lightning").text("trainer.py")
    assert 'sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4)' in text
    config = yaml.safe_load(export(plan, "accelerate").text("accelerate.yaml"))
    assert config["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert "2 replicas of 4 shards" in gaps(export(plan, "deepspeed"))


def test_partial_recompute_is_rounded_up_and_said() -> None:
    modes = {f"layers.{i}": "full" for i in range(3)}
    plan = plan_of(Parallelism(pp=2, dp_replicate=2), 16, recompute=modes)
    found = export(plan, "megatron")
    assert arguments(found)["--recompute-num-layers"] == "3"
    assert "up to 3 layers more" in gaps(found)
    assert "3 of 24" in gaps(export(plan, "torchtitan"))
    assert "3 layers full" in gaps(export(plan, "deepspeed"))


def test_all_recompute_is_exact() -> None:
    modes = {f"layers.{i}": "full" for i in range(24)}
    plan = plan_of(Parallelism(dp_shard=8, zero=3), 16, recompute=modes)
    assert not export(plan, "megatron").gaps
    assert not export(plan, "torchtitan").gaps
    assert not export(plan, "accelerate").gaps


@pytest.mark.parametrize("target", ["accelerate", "lightning"])
def test_targets_without_stages_refuse(target: str) -> None:
    with pytest.raises(PlannerError, match=r"pp=2: not expressible.*--pin pp=1"):
        export(plan_of(H12, 64), target)


@pytest.mark.parametrize("target", ["lightning", "dtensor"])
@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_targets_without_an_axis_refuse(target: str, axis: str) -> None:
    degrees: dict[str, Any] = {"dp_shard": 4, "zero": 1, axis: 2}
    shape = Parallelism(**degrees)
    with pytest.raises(PlannerError, match=f"{axis}=2: not expressible"):
        export(plan_of(shape, 16), target)


def test_deepspeed_has_no_tensor_parallelism_under_zero_3() -> None:
    with pytest.raises(PlannerError, match="under ZeRO-3"):
        export(plan_of(Parallelism(tp=2, dp_shard=4, zero=3), 16), "deepspeed")


def test_accelerate_ddp() -> None:
    plan = plan_of(Parallelism(dp_replicate=8), 64)
    found = export(plan, "accelerate")
    config = yaml.safe_load(found.text("accelerate.yaml"))
    assert config["distributed_type"] == "MULTI_GPU"
    assert config["num_processes"] == 8
    arguments = json.loads(found.text("training_arguments.json"))
    assert arguments["gradient_accumulation_steps"] == 8


def test_every_file_is_readable_and_has_a_readme(tmp_path: Path) -> None:
    plan = plan_of(Parallelism(dp_shard=8, zero=3, micro_batch_size=2), 64)
    for name in (*TRAINING, "dtensor"):
        written = export(plan, name).write(tmp_path / name)
        assert written[-1].name == "README.txt"
        readme = written[-1].read_text()
        assert (
            "8 ranks; global batch 64 = 8 data-parallel x 2 micro-batch x 4" in readme
        )
        for file in written:
            text = file.read_text()
            if file.suffix == ".py":
                ast.parse(text)
            elif file.suffix == ".json":
                json.loads(text)
            elif file.suffix == ".toml":
                tomllib.loads(text)
            elif file.suffix == ".yaml":
                yaml.safe_load(text)


def test_unknown_target() -> None:
    with pytest.raises(PlannerError, match="did you mean megatron"):
        export(plan_of(H12, 64), "megatrn")
    assert {name for name, _ in targets()} >= {*TRAINING, "dtensor"}


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = export(plan_of(H12, 64), "megatron")
    with pytest.raises(PlannerError, match="can not make the folder"):
        found.write(tmp_path / "file")


# ---- the targets' own parsers, where they are installed ---------------------------


def test_torchtitan_parses_the_job_file(tmp_path: Path) -> None:
    pytest.importorskip("tyro", reason="torchtitan's parser is not installed")
    titan = pytest.importorskip("torchtitan.config.job_config", reason="torchtitan 0.2")
    shapes = (
        Parallelism(dp_shard=8, zero=3),
        Parallelism(tp=2, pp=4, dp_shard=2, zero=1),
        Parallelism(pp=4, vpp=2, dp_replicate=2),
    )
    from torchtitan.config import ConfigManager  # type: ignore[import-not-found]

    for shape in shapes:
        plan = plan_of(shape, 64)
        export(plan, "torchtitan").write(tmp_path)
        file = str(tmp_path / "job.toml")
        job: Any = ConfigManager(titan.JobConfig).parse_args(
            ["--job.config_file", file]
        )
        assert job.parallelism.pipeline_parallel_degree == shape.pp
        assert job.training.global_batch_size == 64


def test_accelerate_reads_the_config(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import (  # type: ignore[import-not-found]
        load_config_from_file,
    )

    for shape in (Parallelism(dp_shard=8, zero=3), Parallelism(dp_replicate=8)):
        export(plan_of(shape, 64), "accelerate").write(tmp_path)
        config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
        assert config.num_processes == 8
        options = Path(inspect.getfile(load_config_from_file)).parents[1] / "launch.py"
        known = options.read_text()
        names = accelerate_module.FSDP_KEYS | accelerate_module.PARALLELISM_KEYS
        for name in names:
            assert f"--{name}" in known


def test_deepspeed_reads_the_config(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.config import (  # type: ignore[import-not-found]
        DeepSpeedZeroConfig,
    )

    for shape in (
        Parallelism(dp_shard=8, zero=3),
        Parallelism(dp_replicate=2, dp_shard=4, zero=3),
        H12,
    ):
        text = export(plan_of(shape, 64), "deepspeed").text("ds_config.json")
        zero = DeepSpeedZeroConfig(**json.loads(text)["zero_optimization"])
        assert zero.stage == shape.zero


def test_lightning_has_the_arguments() -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import Trainer  # type: ignore[import-not-found]
    from lightning.pytorch.strategies import (  # type: ignore[import-not-found]
        FSDPStrategy,
        ModelParallelStrategy,
    )

    for shape in (
        Parallelism(dp_shard=8, zero=3),
        Parallelism(tp=2, dp_shard=4, zero=3),
    ):
        text = export(plan_of(shape, 64), "lightning").text("trainer.py")
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call):
                continue
            kinds = {
                "FSDPStrategy": FSDPStrategy,
                "ModelParallelStrategy": ModelParallelStrategy,
                "Trainer": Trainer,
            }
            func = call.func
            name = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
            known = inspect.signature(kinds[name].__init__).parameters
            assert {k.arg for k in call.keywords if k.arg} <= set(known)


def test_dtensor_code_places_parameters() -> None:
    """The generated code runs: parameters land as planned on a mesh of tp ranks."""
    import torch
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 32, bias=False)
            self.down = nn.Linear(32, 8, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.head = nn.Linear(8, 16, bias=False)

    modes = {"layers.0": "full"}
    plan = plan_of(Parallelism(tp=4), 8, layers=2, recompute=modes)
    code: dict[str, Any] = {}
    exec(export(plan, "dtensor").text("parallel.py"), code)
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=1, world_size=4
    )
    try:
        model = code["place_parameters"](Model(), code["mesh"]("cpu"))
        placed = {n: str(p.placements[0]) for n, p in model.named_parameters()}
        assert model.layers[0].up.weight.to_local().shape == (8, 8)
        assert model.layers[1].down.weight.to_local().shape == (8, 8)
        assert all("Shard" in text or "S(" in text for text in placed.values())
        model = code["recompute"](model)
        wrapped = [type(m).__name__ for m in model.layers]
        assert wrapped == ["CheckpointWrapper", "Layer"]
    finally:
        torch.distributed.destroy_process_group()
