"""The pipeline schedule of one rank: the simulator's order, with messages between.

Rank order comes from :func:`cost_models.schedules.order`, the one that prices and
pictures are made from. Every activation that is alive across a cut is sent to the next
virtual stage, skip connections hop from stage to stage; gradients return the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.schedules import Kind, Schedule, order, rank_of, stage_of
from planner.runtime.comm import Recorder
from planner.runtime.program import Program, Values
from planner.runtime.stagework import Chunk, Flight
from planner.runtime.topology import Topology

_TAGS = 4096  # tensors of one cut


@dataclass(slots=True)
class Mail:
    """Messages to and from neighbouring virtual stages."""

    topology: Topology
    program: Program
    recorder: Recorder
    pending: list[tuple[Any, Tensor]] = field(default_factory=list[tuple[Any, Tensor]])
    local: dict[tuple[str, int, int], Values] = field(
        default_factory=dict[tuple[str, int, int], Values]
    )

    def send(
        self, kind: str, stage: int, micro: int, rank: int, values: Values,
        names: Sequence[str],
    ) -> None:  # fmt: skip
        """Hand ``names`` of the cut before ``stage`` to pipeline rank ``rank``."""
        if rank == self.topology.stage:
            self.local[(kind, stage, micro)] = {n: values[n].detach() for n in names}
            return
        total = 0
        for k, name in enumerate(names):
            tensor = values[name].detach().contiguous()
            total += tensor.numel() * tensor.element_size()
            if tensor.is_meta:
                continue
            work = dist.isend(
                tensor, self.topology.pp.ranks[rank], self._group(kind),
                self._tag(kind, stage, micro, k),
            )  # fmt: skip
            self.pending.append((work, tensor))
        if kind == "forward":
            self._note(kind, total)

    def receive(
        self, kind: str, stage: int, micro: int, rank: int, names: Sequence[str]
    ) -> Values:
        """What :meth:`send` sent."""
        if rank == self.topology.stage:
            return self.local.pop((kind, stage, micro))
        result: Values = {}
        works: list[Any] = []
        for k, name in enumerate(names):
            like = self.program.graph.tensor(name)
            tensor = torch.empty(
                self.program.local_shape(name),
                dtype=getattr(torch, like.dtype),
                device=self.topology.device,
            )
            result[name] = tensor
            if tensor.is_meta:
                continue
            works.append(
                dist.irecv(
                    tensor, self.topology.pp.ranks[rank], self._group(kind),
                    self._tag(kind, stage, micro, k),
                )
            )  # fmt: skip
        for work in works:
            work.wait()
        if kind == "backward":
            self._note(kind, sum(t.numel() * t.element_size() for t in result.values()))
        return result

    def _note(self, kind: str, total: int) -> None:
        """A message belongs to the stage before its cut, whichever way it goes."""
        self.recorder.add("p2p", "pp", 2, total, kind, f"stage {self.topology.stage}")

    def _group(self, kind: str) -> Any:
        forward = kind == "forward"
        return self.topology.pp.group if forward else self.topology.backward_group

    def _tag(self, kind: str, stage: int, micro: int, k: int) -> int:
        assert k < _TAGS
        return ((micro * 512 + stage) * 2 + (kind == "backward")) % 2**18 * _TAGS + k

    def finish(self) -> None:
        """Wait until every message has left."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Runs a step's micro-batches through this rank's chunks."""

    schedule: Schedule
    chunks: tuple[Chunk, ...]
    topology: Topology
    mail: Mail

    def run(
        self, micro_inputs: Callable[[int], Values], count: int, scale: float
    ) -> Tensor | None:
        """Forward and backward of ``count`` micro-batches; the mean loss, if here."""
        ranks, rank = self.topology.pp.size, self.topology.stage
        virtual = len(self.chunks)
        last = ranks * virtual - 1
        flights: dict[tuple[int, int], Flight] = {}
        losses: list[Tensor] = []
        for work in order(self.schedule, rank, ranks, count, virtual):
            chunk = self.chunks[work.chunk]
            v = stage_of(self.schedule, rank, work.chunk, ranks)
            key = (work.micro, work.chunk)
            before, after = (
                rank_of(self.schedule, v - 1, ranks) if v > 0 else -1,
                rank_of(self.schedule, v + 1, ranks) if v < last else -1,
            )
            if work.kind is Kind.F:
                arrived: Values = {}
                if before >= 0 and chunk.takes:
                    arrived = self.mail.receive(
                        "forward", v, work.micro, before, chunk.takes
                    )
                flight = chunk.forward(micro_inputs(work.micro), arrived)
                if flight.loss is not None:
                    losses.append(flight.loss.detach())
                if after >= 0 and chunk.gives:
                    self.mail.send(
                        "forward", v + 1, work.micro, after, flight.sent, chunk.gives
                    )
                flights[key] = flight
            elif work.kind is Kind.B:
                flight = flights.pop(key)
                grads: Values = {}
                back = [n for n in chunk.gives if chunk.wants_grad[n]]
                if after >= 0 and back:
                    grads = self.mail.receive(
                        "backward", v + 1, work.micro, after, back
                    )
                given = chunk.backward(flight, grads, scale)
                names = [n for n in chunk.takes if chunk.wants_grad[n]]
                if before >= 0 and names:
                    self.mail.send("backward", v, work.micro, before, given, names)
        self.mail.finish()
        return torch.stack(losses).mean() if losses else None
