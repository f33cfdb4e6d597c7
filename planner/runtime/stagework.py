"""One pipeline chunk of one rank: forward and backward of a micro-batch."""

from __future__ import annotations

# pyright: reportUnknownVariableType=false
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from planner.runtime.program import BlockProgram, Program, Values
from planner.runtime.store import Store
from planner.runtime.zero3 import BlockParameters


@dataclass(slots=True)
class Flight:
    """A micro-batch between its forward and its backward."""

    arrived: Values
    sent: Values
    loss: Tensor | None


class Chunk:
    """Consecutive blocks as one virtual stage.

    ``takes`` and ``gives``: boundary activations that enter and leave, whatever block
    made them. ``modes``: recompute mode by block name.
    """

    def __init__(
        self,
        program: Program,
        store: Store,
        blocks: Sequence[int],
        takes: Sequence[str],
        gives: Sequence[str],
        modes: Mapping[str, str],
        loss: str,
    ) -> None:
        self.program, self.store = program, store
        self.blocks = [program.blocks[b] for b in blocks]
        self.takes, self.gives, self.loss = tuple(takes), tuple(gives), loss
        self.modes = [modes.get(b.block.name, "none") for b in self.blocks]
        graph = program.graph
        self.wants_grad = {
            n: graph.tensor(n).requires_grad for n in (*self.takes, *self.gives)
        }
        self.last_reader: dict[str, int] = {}
        for k, block in enumerate(self.blocks):
            for name in block.entering:
                self.last_reader[name] = k

    def forward(self, inputs: Values, arrived: Values) -> Flight:
        """Run all blocks; ``arrived`` holds what ``takes`` names."""
        for name, tensor in arrived.items():
            tensor.requires_grad_(self.wants_grad[name])
        values: Values = dict(arrived)
        outputs: Values = {}
        for k, block in enumerate(self.blocks):
            entering = {n: values[n] for n in block.entering}
            made = self._run(block, self.modes[k], {**inputs, **entering})
            values.update(made)
            outputs.update({n: made[n] for n in block.outputs})
            for name, last in self.last_reader.items():
                if last == k and name not in self.gives:
                    values.pop(name, None)
        sent = {n: values[n] for n in self.gives}
        return Flight(arrived, sent, outputs.get(self.loss))

    def _run(self, block: BlockProgram, mode: str, entering: Values) -> Values:
        names = [n for n in block.stored if n in self.store.parameters]
        job = None
        if self.store.gathers and names:
            index = block.block.index
            job = BlockParameters(
                self.store, self.program.recorder, index, tuple(names)
            )

        def body(values: Values) -> Values:
            if job is None:
                return self._body(block, values, mode)
            job.enter()
            try:
                if mode == "full":
                    return self._body(block, values, mode)
                with job.hooks():
                    made = self._body(block, values, mode)
                job.before_backward(made.values())
                return made
            finally:
                job.leave()

        if mode != "full" or not torch.is_grad_enabled():
            return body(entering)
        with set_checkpoint_early_stop(False):
            return checkpoint(body, entering, use_reentrant=False)  # type: ignore[no-any-return]

    def _body(self, block: BlockProgram, values: Values, mode: str) -> Values:
        index = block.block.index

        def stored(name: str) -> Tensor:
            return self.store.read(name, index)

        return self.program.run_block(
            block, values, stored, selective=mode == "selective"
        )

    def backward(
        self, flight: Flight, grads: Mapping[str, Tensor], scale: float
    ) -> Values:
        """Gradients of what arrived, given those of what was sent (or the loss)."""
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for name, tensor in flight.sent.items():
            if self.wants_grad[name] and tensor.requires_grad:
                roots.append(tensor)
                seeds.append(grads[name])
        if flight.loss is not None:
            roots.append(flight.loss)
            seeds.append(torch.full_like(flight.loss, scale))
        with self.program.recorder.backward():
            if roots:
                torch.autograd.backward(roots, seeds)
        result: Values = {}
        for name, tensor in flight.arrived.items():
            if self.wants_grad[name]:
                grad = tensor.grad
                result[name] = torch.zeros_like(tensor) if grad is None else grad
        return result
