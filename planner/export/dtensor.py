"""Plain PyTorch: a DeviceMesh, parameters as DTensors, FSDP2 or DDP, pipelining.

The source needs torch only. It places parameters as planned and leaves what lies
between the ops to DTensor's own propagation; ``planner.runtime`` runs every op as the
plan says.
"""

from __future__ import annotations

import re

from planner.errors import PlannerError
from planner.export.base import Backend, Export, Facts, Gap, check_schedule, present
from planner.plan import Plan

SCHEDULES = {
    ("gpipe", 1): "ScheduleGPipe",
    ("1f1b", 1): "Schedule1F1B",
    ("zero_bubble", 1): "ScheduleInterleavedZeroBubble",
    ("zero_bubble", 2): "ScheduleZBVZeroBubble",
}
_PLAIN = re.compile(r"S\((\d+)\)")

_HEAD = '''"""A plan in plain PyTorch for torchrun; README.txt says what is left out."""

import re

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

'''
_MESH = '''

def mesh(device_type="cuda"):
    """The plan's device mesh; ranks are row-major."""
    return init_device_mesh(
        device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH)
    )


def dim_of(name):
    """The dim of a parameter that tensor parallelism divides, or None."""
    return TENSOR_DIM.get(re.sub(r"\\.\\d+\\.", ".*.", name), TENSOR_DIM.get(name))


def place_parameters(model, device_mesh):
    """Turns the parameters into DTensors over the tensor axis, as planned."""
    tp = device_mesh["tp"]
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = dim_of(f"{module_name}.{name}" if module_name else name)
            placement = Replicate() if dim is None else Shard(dim)
            local = distribute_tensor(parameter, tp, [placement])
            new = nn.Parameter(local, requires_grad=parameter.requires_grad)
            setattr(module, name, new)
    return model


'''
_FSDP = '''def divide_data(model, device_mesh):
    """FSDP2 over the data axes: every layer on its own, then the rest."""
    from torch.distributed.fsdp import fully_shard

    data = device_mesh[DATA_AXES]
    modules = dict(model.named_modules())
    for name in LAYERS:
        if name in modules:
            fully_shard(modules[name], mesh=data, reshard_after_forward=RESHARD)
    return fully_shard(model, mesh=data, reshard_after_forward=RESHARD)


'''
_DDP = '''def divide_data(model, device_mesh):
    """Whole replicas: gradients are summed by DDP."""
    if MESH["dp_replicate"] == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, device_mesh=device_mesh["dp_replicate"])


'''
_RECOMPUTE = '''def recompute(model):
    """Wraps the layers that the plan recomputes in full."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )

    for name in RECOMPUTED:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent) if parent else model
        setattr(owner, child, checkpoint_wrapper(getattr(owner, child)))
    return model


'''
_TRAIN = '''def step(model, optimizer, loss_of, micro_batches):
    """One step: ACCUMULATION micro-batches of MICRO_BATCH samples on every rank."""
    assert len(micro_batches) == ACCUMULATION
    total = 0.0
    for k, batch in enumerate(micro_batches):
        last = k == ACCUMULATION - 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        loss = loss_of(model, batch) / ACCUMULATION
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total
'''
_PIPELINE = '''def schedule(stages, loss_fn):
    """The plan's schedule over this rank's PipelineStage objects (STAGES says which
    blocks each virtual stage holds, in model order)."""
    from torch.distributed import pipelining

    kind = getattr(pipelining, SCHEDULE, None) or getattr(
        pipelining.schedules, SCHEDULE
    )
    held = stages[0] if SCHEDULE in ("Schedule1F1B", "ScheduleGPipe") else stages
    return kind(held, n_microbatches=ACCUMULATION, loss_fn=loss_fn)
'''


def dtensor(plan: Plan) -> Export:
    """``parallel.py``."""
    facts = Facts.of(plan)
    p, f, gaps = facts.p, facts.figures, list[Gap]()
    for name, size in (("cp", p.cp), ("ep", p.ep)):
        if size > 1:
            raise PlannerError(
                f"plain DTensor code has no {name}",
                f"{name}={size}: not expressible",
                f"plan again with --pin {name}=1, or run it with planner.runtime",
            )
    check_schedule(facts, Backend.TORCH, "torch.distributed.pipelining")
    dims = _tensor_dims(facts, gaps)
    full = [n for n in facts.layers if plan.recompute.get(n) == "full"]
    if facts.modes().get("selective"):
        gaps.append(
            Gap(
                f"selective recompute in {facts.modes()['selective']} layers",
                "they keep their activations: use checkpoint's context_fn",
            )
        )
    if p.tp > 1:
        gaps.append(
            Gap(
                "placements of activations between ops",
                "DTensor's propagation chooses; planner.runtime runs them as planned",
            )
        )
    constants: dict[str, object] = {
        "MESH": dict(p.axes),
        "MICRO_BATCH": f.micro_batch,
        "ACCUMULATION": f.accumulation,
        "GLOBAL_BATCH": f.global_batch,
        "TENSOR_DIM": dims,
        "LAYERS": list(facts.layers),
        "RECOMPUTED": full,
    }
    divided = p.dp_shard > 1
    beside = not divided and p.dp_replicate > 1 and p.tp > 1
    if beside:
        gaps.append(
            Gap(
                f"{p.dp_replicate} plain replicas (DDP) together with tp",
                "FSDP2 divides them, in less memory",
            )
        )
    if divided or beside:
        axes = ("dp_replicate", "dp_shard") if p.dp_replicate > 1 else ("dp_shard",)
        constants["DATA_AXES"] = axes if divided else ("dp_replicate",)
        constants["RESHARD"] = p.zero == 3
    if divided and p.zero < 3:
        gaps += present(
            facts.state_gap(
                3, "FSDP2 without resharding runs: all state is divided, "
                "parameters stay whole between forward and backward",
            )
        )  # fmt: skip
    if p.pp > 1:
        constants["STAGES"] = [list(part) for part in facts.chunks]
        constants["SCHEDULE"] = SCHEDULES.get(
            (p.schedule, p.vpp), "ScheduleInterleaved1F1B"
        )
    body = _FSDP if divided or beside else _DDP
    text = "".join(
        (
            _HEAD,
            *(f"{name} = {value!r}\n" for name, value in constants.items()),
            _MESH,
            body,
            _RECOMPUTE,
            _PIPELINE if p.pp > 1 else _TRAIN,
        )
    )
    notes = ["place_parameters, then recompute, then divide_data, then the optimizer"]
    if p.pp > 1:
        notes.append("cut your model at STAGES before placing each part")
    return Export(
        "dtensor",
        (("parallel.py", text),),
        f,
        tuple(gaps),
        tuple(notes),
        facts.torchrun("train.py  # which imports parallel.py"),
    )


def _tensor_dims(facts: Facts, gaps: list[Gap]) -> dict[str, int]:
    """Dim that the tensor axis divides, by parameter (with ``*`` for layer numbers)."""
    dims: dict[str, int] = {}
    fused: list[str] = []
    for name, record in facts.plan.placements.items():
        if record.what != "parameter":
            continue
        text = record.outputs[0].placement.get("tp", "R")
        plain = _PLAIN.fullmatch(text)
        if plain:
            dims[name] = int(plain[1])
        elif text != "R":
            fused.append(f"{name} {text}")
    if fused:
        gaps.append(
            Gap(
                f"shards of fused parameters ({', '.join(fused)})",
                "every tensor-parallel rank keeps them whole",
            )
        )
    return dims
