"""Parameters, buffers and gradients of one rank.

A parameter has up to three forms: the *master*, an ``nn.Parameter`` holding a DTensor
that the user's optimizer steps (fp32, divided by tensor parallelism and from ZeRO-1 on
by the data ranks too); the *working* tensor that ops read (in the plan's precision,
one tensor-parallel rank's part); under ZeRO-3 the working *shard* from which a block's
parameters are gathered while it runs. Forms that hold the same elements share memory.

Where a placement takes a share of several parts (``S(0;3x)`` of a fused QKV weight) the
DTensor's ``Shard`` holds the same local rows, so its global order is a permutation of
the model's: :meth:`Store.permuted` names these, :meth:`Store.full` undoes it.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from planner.runtime.comm import convert
from planner.runtime.layout import cut, padded, share
from planner.runtime.topology import Topology
from planner.search.placements import REPLICATED, Placement


@dataclass(slots=True)
class Stored:
    """One parameter of this rank.

    ``local``: shape of the tensor-parallel part. ``rows``: (start, length) along its
    dim 0 of this data rank's shard. ``blocks``: those of this rank that read it.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    placement: Placement
    trainable: bool
    rows: tuple[int, int]
    summed: bool  # its gradient is a sum over tp
    master: nn.Parameter
    work: Tensor | None = None  # a leaf; None under ZeRO-3
    shard: Tensor | None = None  # the working shard, a leaf, under ZeRO-3
    shares: bool = False  # the leaf is the master's memory
    gradient: Tensor | None = None  # accumulated, where not in the leaf's own .grad

    @property
    def leaf(self) -> Tensor:
        """The tensor whose gradient autograd accumulates."""
        found = self.shard if self.work is None else self.work
        assert found is not None
        return found

    @property
    def chunk(self) -> int:
        """Elements of one data rank's padded shard."""
        return self.step * self.row

    step: int = 0
    row: int = 0


class Store:
    """All stored tensors of this rank."""

    def __init__(
        self, topology: Topology, zero: int, work_dtype: torch.dtype | None,
        gradient_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.topology, self.zero = topology, zero
        self.work_dtype, self.gradient_dtype = work_dtype, gradient_dtype
        self.parameters: dict[str, Stored] = {}
        self.buffers: dict[str, Tensor] = {}
        self.stale = False
        self._gathered: dict[int, dict[str, Tensor]] = {}

    @property
    def divided(self) -> bool:
        """Whether data ranks hold different parts of a master."""
        return self.zero > 0 and self.topology.shard.size > 1

    @property
    def gathers(self) -> bool:
        """Whether working parameters are gathered block by block."""
        return self.zero >= 3 and self.topology.shard.size > 1

    # ---- filling ---------------------------------------------------------------

    def cut_parameter(self, full: Tensor, placement: Placement) -> Tensor:
        """This tensor-parallel rank's part of a whole parameter."""
        tp = self.topology.tp
        return cut(full, placement, tp.size, tp.rank)

    def add_parameter(
        self, name: str, full: Tensor, placement: Placement, *,
        trainable: bool, summed: bool,
    ) -> None:  # fmt: skip
        """Keep this rank's part of ``full`` (on any device)."""
        topology = self.topology
        local = self.cut_parameter(full, placement).to(topology.device)
        n0 = local.shape[0] if local.dim() else 1
        size = topology.shard.size
        rows = share(n0, size, topology.shard.rank) if self.divided else (0, n0)
        mixed = self.work_dtype is not None and local.is_floating_point()
        master_dtype = torch.float32 if mixed and trainable else local.dtype
        work_dtype = self.work_dtype if mixed else local.dtype
        flat = local.reshape(n0, -1)
        mine = flat[rows[0] : rows[0] + rows[1]].reshape(-1, *local.shape[1:])
        mine = mine.reshape(local.shape) if not self.divided else mine
        held = mine.to(master_dtype).clone(memory_format=torch.contiguous_format)
        master = nn.Parameter(
            self.distribute(held, tuple(full.shape), placement), requires_grad=trainable
        )
        stored = Stored(
            name, tuple(full.shape), tuple(local.shape), placement, trainable, rows,
            summed, master,
        )  # fmt: skip
        stored.step = -(-n0 // size) if self.divided else n0
        stored.row = flat.shape[1]
        shared = self.local_master(stored).detach()
        if self.gathers:
            stored.shares = shared.dtype == work_dtype
            stored.shard = shared.to(work_dtype).requires_grad_(trainable)
        elif not self.divided and shared.dtype == work_dtype:
            stored.shares = True
            stored.work = shared.requires_grad_(trainable)
        else:
            stored.work = local.to(work_dtype).clone().requires_grad_(trainable)
        self._accumulate_in(stored)
        self.parameters[name] = stored

    def _accumulate_in(self, stored: Stored) -> None:
        """Sum micro-batches in ``gradient_dtype`` where that is not the leaf's own."""
        leaf, dtype = stored.leaf, self.gradient_dtype
        if not stored.trainable or dtype is None or dtype == leaf.dtype:
            return

        def hook(p: Tensor) -> None:
            assert p.grad is not None
            wide = p.grad.to(dtype)
            stored.gradient = (
                wide if stored.gradient is None else stored.gradient + wide
            )
            p.grad = None

        leaf.register_post_accumulate_grad_hook(hook)

    def add_buffer(self, name: str, full: Tensor, placement: Placement) -> None:
        """Keep this rank's part of a buffer."""
        part = self.cut_parameter(full, placement).to(self.topology.device)
        self.buffers[name] = part.clone()

    def distribute(
        self, local: Tensor, shape: tuple[int, ...], placement: Placement
    ) -> DTensor:
        """The DTensor of a master (or of a state of the same layout)."""
        places = [
            Replicate(),
            Shard(placement.axis) if placement.kind == "S" else Replicate(),
            Shard(0) if self.divided and shape else Replicate(),
        ]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local,
            self.topology.storage_mesh,
            places,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )

    # ---- reading ---------------------------------------------------------------

    @staticmethod
    def local_master(stored: Stored) -> Tensor:
        """This rank's elements of the master, without a gradient history."""
        data = stored.master.detach()
        assert isinstance(data, DTensor)
        return data.to_local()

    def permuted(self) -> tuple[str, ...]:
        """Parameters whose DTensor has another element order than the model's."""
        return tuple(
            n
            for n, s in self.parameters.items()
            if s.placement.kind == "S" and (s.placement.parts or s.placement.outer > 1)
        )

    def read(self, name: str, block: int) -> Tensor:
        """What an op of ``block`` reads."""
        if name in self.buffers:
            return self.buffers[name]
        if self.gathers:
            return self._gathered[block][name]
        found = self.parameters[name].work
        assert found is not None
        return found

    def full(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of ``name``'s layout from every rank's ``local`` part."""
        stored, topology = self.parameters[name], self.topology
        part = self.whole_rows(stored, local)
        if stored.placement.kind == "S":
            part = convert(
                part, stored.placement, REPLICATED, stored.shape, topology.tp, "step"
            )
        return part

    def whole_rows(self, stored: Stored, local: Tensor) -> Tensor:
        """The tensor-parallel part from the data ranks' rows."""
        if not self.divided:
            return local.reshape(stored.local)
        row = local.reshape(-1, stored.row)
        flat = padded(row, 0, stored.step).reshape(-1)
        rows = self.topology.shard.gather_flat(flat, "step")
        n0 = stored.local[0] if stored.local else 1
        return rows.reshape(-1, stored.row)[:n0].reshape(stored.local)

    def my_rows(self, stored: Stored, part: Tensor) -> Tensor:
        """This data rank's rows of a tensor-parallel part."""
        if not self.divided:
            return part
        start, length = stored.rows
        n0 = stored.local[0] if stored.local else 1
        mine = part.reshape(n0, -1)[start : start + length]
        return mine.reshape(-1, *stored.local[1:])

    # ---- packing: one collective for many tensors ---------------------------------

    def elements(self, names: Iterable[str]) -> int:
        """Elements of the tensor-parallel parts of ``names``, without padding."""
        return sum(prod(self.parameters[n].local) for n in names)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensor-parallel parts as [data ranks, elements], each padded to divide."""
        size = self.topology.shard.size
        columns: list[Tensor] = []
        for name, tensor in tensors.items():
            stored = self.parameters[name]
            rows = padded(tensor.reshape(-1, stored.row), 0, stored.step * size)
            columns.append(rows.reshape(size, -1))
        return torch.cat(columns, 1)

    def unpack(self, flat: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """[data ranks, elements] back to tensor-parallel parts."""
        result: dict[str, Tensor] = {}
        at = 0
        for name in names:
            stored = self.parameters[name]
            piece = flat[:, at : at + stored.chunk].reshape(-1, stored.row)
            n0 = stored.local[0] if stored.local else 1
            result[name] = piece[:n0].reshape(stored.local)
            at += stored.chunk
        return result

    def pack_shards(self, shards: Mapping[str, Tensor]) -> Tensor:
        """This rank's shards as one padded row."""
        rows: list[Tensor] = []
        for name, tensor in shards.items():
            stored = self.parameters[name]
            row = tensor.reshape(-1, stored.row)
            rows.append(padded(row, 0, stored.step).reshape(-1))
        return torch.cat(rows)

    def unpack_shards(self, flat: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """One padded row back to this rank's shards."""
        result: dict[str, Tensor] = {}
        at = 0
        for name in names:
            stored = self.parameters[name]
            piece = flat[at : at + stored.chunk].reshape(-1, stored.row)
            mine = piece[: stored.rows[1]]
            result[name] = mine.reshape(-1, *stored.local[1:])
            at += stored.chunk
        return result

    # ---- refresh ---------------------------------------------------------------

    def refresh(self) -> None:
        """Bring working parameters up to date with the masters."""
        if not self.stale:
            return
        self.stale = False
        copied = {
            n: s for n, s in self.parameters.items() if s.trainable and not s.shares
        }
        if not copied:
            return
        with torch.no_grad():
            if self.gathers or not self.divided:
                for s in copied.values():
                    s.leaf.copy_(self.local_master(s).reshape(s.leaf.shape))
                return
            self._gather_into(copied)

    def _gather_into(self, copied: Mapping[str, Stored]) -> None:
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, s in copied.items():
            by_dtype.setdefault(s.leaf.dtype, []).append(name)
        for dtype, names in by_dtype.items():
            shards = {n: self.local_master(copied[n]).to(dtype) for n in names}
            flat = self.topology.shard.gather_flat(
                self.pack_shards(shards), "step", "parameters", self.elements(names)
            )
            for name, part in self.unpack(flat, names).items():
                copied[name].leaf.copy_(part)

    # ---- ZeRO-3 ----------------------------------------------------------------

    def gathered(self, block: int) -> dict[str, Tensor] | None:
        """What :meth:`hold` keeps for ``block``."""
        return self._gathered.get(block)

    def hold(self, block: int, values: dict[str, Tensor]) -> None:
        """Keep a block's gathered parameters while it runs."""
        self._gathered[block] = values

    def release(self, block: int) -> None:
        """Let a block's gathered parameters go."""
        self._gathered.pop(block, None)

    def names(self) -> Iterable[str]:
        """Parameters, then buffers."""
        return (*self.parameters, *self.buffers)
