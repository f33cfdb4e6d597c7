"""In every target the same numbers: batch, micro-batch, accumulation, world.

They are read back from the written files by the rules of the target itself, not from
what the exporter says about them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import tomllib
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import importers
from planner.errors import PlannerError
from planner.export import Export, export
from planner.workload import Parallelism
from tests.unit.planner.export.plans import plan_of

Read = tuple[int, int, int, int]  # world, micro-batch, accumulation, global batch


def megatron(found: Export, world: int) -> Read:
    said: dict[str, str] = {}
    for line in found.text("arguments.txt").splitlines():
        name, _, value = line.partition(" ")
        said[name] = value
    names = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    model = prod(int(said[f"--{n}-size"]) for n in names)
    assert world % model == 0
    data, micro = world // model, int(said["--micro-batch-size"])
    batch = int(said["--global-batch-size"])
    assert batch % (data * micro) == 0  # Megatron's own assertion
    return model * data, micro, batch // (data * micro), batch


def nemo(found: Export, world: int) -> Read:
    given: dict[str, Any] = {}
    for node in ast.walk(ast.parse(found.text("strategy.py"))):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            given[str(node.arg)] = node.value.value
    model = prod(
        given[f"{n}_size"]
        for n in (
            "tensor_model_parallel",
            "pipeline_model_parallel",
            "context_parallel",
        )
    )
    assert given["devices"] * given["num_nodes"] == world
    data, micro = world // model, given["micro_batch_size"]
    batch = given["global_batch_size"]
    return model * data, micro, batch // (data * micro), batch


def torchtitan(found: Export, world: int) -> Read:
    data = tomllib.loads(found.text("job.toml"))
    p, t = data["parallelism"], data["training"]
    ranks = p["data_parallel_replicate_degree"] * p["data_parallel_shard_degree"]
    total = ranks * prod(
        p[f"{n}_parallel_degree"] for n in ("tensor", "context", "pipeline")
    )
    local, batch = t["local_batch_size"], t["global_batch_size"]
    assert batch % (local * ranks) == 0  # the trainer's own check
    outer = batch // (local * ranks)
    if p["pipeline_parallel_degree"] == 1:
        return total, local, outer, batch
    micro = p["pipeline_parallel_microbatch_size"]
    assert local % micro == 0
    return total, micro, outer * (local // micro), batch


def deepspeed(found: Export, world: int) -> Read:
    config = json.loads(found.text("ds_config.json"))
    micro = config["train_micro_batch_size_per_gpu"]
    steps, batch = config["gradient_accumulation_steps"], config["train_batch_size"]
    model = config.get("tensor_parallel", {}).get("autotp_size", 1)
    model *= config.get("sequence_parallel_size", 1)
    for gap in found.gaps:  # stages are in code: the gap says how many
        if "num_stages=" in gap.instead:
            model *= int(gap.instead.split("num_stages=")[1].split(")")[0])
    assert batch == micro * steps * (world // model)  # DeepSpeed's own assertion
    return world, micro, steps, batch


def accelerate(found: Export, world: int) -> Read:
    config = yaml.safe_load(found.text("accelerate.yaml"))
    arguments = json.loads(found.text("training_arguments.json"))
    sizes = config.get("parallelism_config")
    total = prod(sizes.values()) if sizes else config["num_processes"]
    model = prod(
        sizes[f"parallelism_config_{n}_size"] for n in ("tp", "cp")
    ) if sizes else 1  # fmt: skip
    micro = arguments["per_device_train_batch_size"]
    steps = arguments["gradient_accumulation_steps"]
    assert config["num_processes"] == world
    return total, micro, steps, micro * steps * (total // model)


def lightning(found: Export, world: int) -> Read:
    given: dict[str, Any] = {}
    tree = ast.parse(found.text("trainer.py"))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            given[str(node.arg)] = node.value.value
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            assert isinstance(node.targets[0], ast.Name)
            given[node.targets[0].id] = node.value.value
    total = given["devices"] * given["num_nodes"]
    data = total // given.get("tensor_parallel_size", 1)
    assert given.get("data_parallel_size", data) == data
    micro, steps = given["BATCH_SIZE"], given["accumulate_grad_batches"]
    return total, micro, steps, micro * steps * data


def dtensor(found: Export, world: int) -> Read:
    given: dict[str, Any] = {}
    for node in ast.parse(found.text("parallel.py")).body:
        if isinstance(node, ast.Assign):
            assert isinstance(node.targets[0], ast.Name)
            given[node.targets[0].id] = ast.literal_eval(node.value)
    mesh = given["MESH"]
    data = mesh["dp_replicate"] * mesh["dp_shard"]
    micro, steps = given["MICRO_BATCH"], given["ACCUMULATION"]
    assert given["GLOBAL_BATCH"] == data * micro * steps
    return prod(mesh.values()), micro, steps, given["GLOBAL_BATCH"]


READERS: dict[str, Callable[[Export, int], Read]] = {
    "megatron": megatron,
    "nemo": nemo,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "lightning": lightning,
    "dtensor": dtensor,
}
POWERS = st.sampled_from((1, 2, 4))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Parallelism, int]:
    pp = draw(POWERS)
    shard, cp, tp = draw(POWERS), draw(st.sampled_from((1, 2))), draw(POWERS)
    vpp = draw(st.sampled_from((1, 2))) if pp > 1 else 1
    zero = draw(st.sampled_from((0, 1, 2, 3))) if shard > 1 else 0
    ep = draw(st.sampled_from([d for d in (1, 2, 4) if (shard * cp * tp) % d == 0]))
    shape = Parallelism(
        pp=pp,
        dp_replicate=draw(POWERS),
        dp_shard=shard,
        cp=cp,
        ep=ep,
        tp=tp,
        vpp=vpp,
        zero=zero,
        micro_batch_size=draw(st.sampled_from((1, 2, 3))),
    )
    count = draw(st.integers(1, 6)) * (pp if vpp > 1 else 1)
    return shape, shape.data_parallel * shape.micro_batch_size * count


@pytest.mark.parametrize("target", READERS)
@settings(max_examples=40, deadline=None)
@given(case=shapes())
def test_numbers_agree(target: str, case: tuple[Parallelism, int]) -> None:
    shape, batch = case
    plan = plan_of(shape, batch)
    try:
        found = export(plan, target)
    except PlannerError as error:  # refused, with what to do
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.fix
        return
    count = plan.parallelism.num_micro_batches
    expected = (shape.num_gpus, shape.micro_batch_size, count, batch)
    assert READERS[target](found, shape.num_gpus) == expected


@settings(max_examples=40, deadline=None)
@given(case=shapes())
def test_megatron_arguments_come_back(case: tuple[Parallelism, int]) -> None:
    """What is exported and read again is the same but for the gaps."""
    shape, batch = case
    plan = plan_of(shape, batch)
    found = export(plan, "megatron")
    text = found.text("arguments.txt")
    again = importers.megatron_args(text, shape.num_gpus)
    assert again.global_batch == batch
    assert "--micro-batch-size" not in again.ignored
    q = again.parallelism
    for name in ("pp", "cp", "tp", "ep", "vpp", "micro_batch_size", "data_parallel"):
        assert getattr(q, name) == getattr(shape, name), name
    if not any("ZeRO" in g.what for g in found.gaps):
        assert q.zero == (shape.zero if shape.dp_shard * shape.cp > 1 else 0)


@settings(max_examples=30, deadline=None)
@given(case=shapes())
def test_torchtitan_jobs_come_back(case: tuple[Parallelism, int]) -> None:
    shape, batch = case
    plan = plan_of(shape, batch)
    try:
        found = export(plan, "torchtitan")
    except PlannerError:
        return
    again = importers.torchtitan_toml(found.text("job.toml"), shape.num_gpus)
    q = again.parallelism
    assert again.global_batch == batch
    for name in ("pp", "cp", "tp", "ep", "vpp", "micro_batch_size", "data_parallel"):
        assert getattr(q, name) == getattr(shape, name), name


@settings(max_examples=30, deadline=None)
@given(case=shapes())
def test_deepspeed_configs_come_back(case: tuple[Parallelism, int]) -> None:
    shape, batch = case
    if shape.pp > 1:
        return
    plan = plan_of(shape, batch)
    try:
        found = export(plan, "deepspeed")
    except PlannerError:
        return
    text = found.text("ds_config.json")
    again = importers.deepspeed_json(text, shape.num_gpus)
    q = again.parallelism
    assert again.global_batch == batch
    assert (q.tp, q.cp, q.micro_batch_size) == (
        shape.tp,
        shape.cp,
        shape.micro_batch_size,
    )
    assert q.data_parallel == shape.data_parallel
