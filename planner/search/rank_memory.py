"""Memory of one pipeline rank from block solutions, as lines and as a linear bound.

The lines come from :func:`cost_models.memory.training_memory`, at the moment that
binds. For CP-SAT the same is written as static bytes per block, activation bytes per
block and mode, and a constant per rank; a solution is always checked with the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cost_models.hardware import DeviceSpec
from cost_models.memory import (
    OPTIMIZER_STATE_BYTES,
    RECIPES,
    MemoryInputs,
    MemoryLines,
    ParameterGroup,
    training_memory,
)
from passes.ir import OpGraph
from planner.search.blocks import BlockSolution
from planner.search.mesh import Mesh
from planner.search.stages import Counts


@dataclass(frozen=True, slots=True)
class MemorySetup:
    """What all ranks of a configuration share."""

    graph: OpGraph
    buffer_bytes: int
    device: DeviceSpec
    mesh: Mesh
    zero: int
    recipe: str
    optimizer: str
    limit_bytes: float
    fragmentation: float
    micro_batches: int
    training: bool = True
    whole: frozenset[str] = frozenset()  # pinned: no data axis divides them

    @property
    def shard(self) -> int:
        return self.mesh.dp_shard * self.mesh.cp if self.zero else 1

    @property
    def communicators(self) -> int:
        mesh = self.mesh
        return sum(n > 1 for n in (mesh.pp, mesh.dp * mesh.cp, mesh.cp, mesh.tp))


def saved_by_mode(solution: BlockSolution) -> tuple[float, float, float]:
    """Bytes that one block keeps for one micro-batch: none, selective, full.

    Logits and loss stay in every mode: the loss runs as soon as they are made.
    """
    none = solution.saved_bytes - _loss_saved(solution)
    selective = solution.selective_bytes - _loss_saved(solution)
    return none, selective, min(none, solution.input_bytes)


def _loss_saved(solution: BlockSolution) -> float:
    return min(solution.logits_bytes, solution.saved_bytes)


def parameter_groups(
    setup: MemorySetup, held: Sequence[tuple[BlockSolution, int]]
) -> tuple[ParameterGroup, ...]:
    """Elements that the rank holds; a tensor that two blocks share counts once."""
    trainable: dict[tuple[str, int], float] = {}
    frozen: dict[tuple[str, float, int], float] = {}
    shared: set[str] = set()
    for solution, count in held:
        for held_here in solution.parameters:
            name, numel = held_here.name, held_here.numel
            tensor = setup.graph.tensor(name)
            if tensor.aliases:
                if name in shared:
                    continue
                shared.add(name)
                count_here = 1
            else:
                count_here = count
            shard = 1 if name in setup.whole else setup.shard
            if held_here.expert and setup.zero and shard > 1:
                shard = max(1, shard // setup.mesh.ep)
            if tensor.trainable and setup.training:
                key = ("", shard)
                trainable[key] = trainable.get(key, 0.0) + numel * count_here
            else:
                width = tensor.nbytes / max(1, tensor.numel)
                frozen_key = ("", width, shard)
                frozen[frozen_key] = frozen.get(frozen_key, 0.0) + numel * count_here
    groups = [ParameterGroup(n, s, True) for (_, s), n in sorted(trainable.items())]
    groups += [
        ParameterGroup(n, s, False, w) for (_, w, s), n in sorted(frozen.items())
    ]
    return tuple(groups)


def rank_memory(
    setup: MemorySetup,
    solutions: Sequence[BlockSolution],
    counts: Counts,
    in_flight: float,
) -> MemoryLines:
    """The lines of one rank that holds ``counts[r][q]`` blocks of run r in mode q."""
    held = [
        (solution, sum(row))
        for solution, row in zip(solutions, counts, strict=True)
        if sum(row)
    ]
    activations = working = logits = logits_saved = send = 0.0
    unit = 0.0
    for solution, row in zip(solutions, counts, strict=True):
        if not sum(row):
            continue
        kept = saved_by_mode(solution)
        activations += sum(n * a for n, a in zip(row, kept, strict=True))
        back = max(kept[0] - kept[q] for q in range(3) if row[q] or q == 0)
        working = max(working, back + 2 * solution.transient_bytes)
        logits = max(logits, solution.logits_bytes + 2 * solution.transient_bytes)
        logits_saved = max(logits_saved, _loss_saved(solution))
        send = max(send, solution.output_bytes)
        unit = max(unit, sum(p.numel for p in solution.parameters))
    has_loss = any(s.logits_bytes > 0 for s, _ in held)
    return training_memory(
        MemoryInputs(
            device_memory_bytes=setup.device.memory_bytes,
            groups=parameter_groups(setup, held),
            recipe=RECIPES[setup.recipe],
            optimizer=setup.optimizer,
            zero=setup.zero,
            micro_batches=setup.micro_batches,
            ddp=setup.zero == 0 and setup.mesh.dp > 1,
            bucket_bytes=25 * 2**20 if setup.mesh.dp > 1 else 0.0,
            unit_elements=unit if setup.zero >= 2 else 0.0,
            activation_bytes=activations,
            in_flight=in_flight,
            working_bytes=working,
            logits_bytes=logits if has_loss else 0.0,
            logits_saved_bytes=logits_saved if has_loss else 0.0,
            p2p_buffer_bytes=2 * send if setup.mesh.pp > 1 else 0.0,
            buffers_bytes=setup.buffer_bytes,
            arch=setup.device.arch,
            communicators=setup.communicators,
            fragmentation=setup.fragmentation,
            limit_bytes=setup.limit_bytes,
        )
    )


def static_bytes(setup: MemorySetup, solution: BlockSolution) -> float:
    """Bytes that one more block of this kind adds whatever its recompute mode."""
    return state_bytes(setup, parameter_groups(setup, [(solution, 1)]))


def state_bytes(setup: MemorySetup, groups: Iterable[ParameterGroup]) -> float:
    """Parameters, optimizer states and, over several micro-batches, gradients."""
    recipe = RECIPES[setup.recipe]
    states = OPTIMIZER_STATE_BYTES[setup.optimizer] + recipe.master
    total = 0.0
    for group in groups:
        n = group.elements
        stored = n / (group.shard if setup.zero >= 3 else 1)
        if not group.trainable:
            total += stored * group.storage_bytes
            continue
        total += stored * recipe.parameter
        if setup.micro_batches > 1:
            total += n / (group.shard if setup.zero >= 2 else 1) * recipe.gradient
        total += n / (group.shard if setup.zero >= 1 else 1) * states
    return total / (1 - setup.fragmentation)


def activation_bytes(
    setup: MemorySetup, solution: BlockSolution
) -> tuple[float, float, float]:
    """Bytes that one block keeps per micro-batch in flight, by mode."""
    none, selective, full = saved_by_mode(solution)
    share = 1 - setup.fragmentation
    return none / share, selective / share, full / share


def constant_bytes(
    setup: MemorySetup,
    solutions: Sequence[BlockSolution],
    counts: Counts,
    in_flight: float,
) -> float:
    """What the linear form leaves out for these counts: true total minus its terms."""
    lines = rank_memory(setup, solutions, counts, in_flight)
    linear = 0.0
    for solution, row in zip(solutions, counts, strict=True):
        kept = activation_bytes(setup, solution)
        linear += sum(row) * static_bytes(setup, solution)
        linear += in_flight * sum(n * a for n, a in zip(row, kept, strict=True))
    return lines.total_bytes - linear
