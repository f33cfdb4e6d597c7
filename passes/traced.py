"""What a trace hands to the passes: a graph, the parameters and the repeated layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import fx

from passes.ir import Tensor


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive equal layers, of which only the first two units were traced.

    ``prefix`` is the module path of their container (``"transformer.h"``); ``original``
    the child names of the whole run in order (``("0", ..., "95")``) and ``kept`` those
    that the graph contains (``("0", "1")``, module paths ``transformer.h.0`` and
    ``transformer.h.1``). ``period`` layers make one unit (2 for A B A B ...): the run
    is ``len(original) // period`` copies of the unit and the graph holds two of them.
    Each unit's inputs are the outputs of the unit before it and tensors from outside
    the run that every unit shares.
    """

    prefix: str
    original: tuple[str, ...]
    kept: tuple[str, ...]
    period: int = 1

    def __post_init__(self) -> None:
        assert len(self.kept) == 2 * self.period, "two units are traced"
        assert len(self.original) % self.period == 0, "whole units only"
        assert self.original[: len(self.kept)] == self.kept, "the first units are kept"

    @property
    def units(self) -> int:
        """How many times the unit occurs in the whole model."""
        return len(self.original) // self.period

    def path(self, child: str) -> str:
        """Module path of one child of the run."""
        return f"{self.prefix}.{child}" if self.prefix else child


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as a graph of aten ops.

    ``graph_module`` is an ``fx.GraphModule`` for ``batch`` samples, to be run by an
    interpreter that respects ``meta["no_grad"]`` (regions are written in place):
    ``placeholder`` nodes are the user's tensors, ``get_attr`` nodes the parameters and
    buffers (``target`` is the dotted name, canonical for tied ones), the rest calls of
    aten overloads (not decomposed: linear, conv2d, layer_norm,
    scaled_dot_product_attention ... stay whole). Guards and asserts are gone. Every
    node that yields tensors carries

    * ``meta["val"]``: fake tensor (or a tuple/list of them, or a number), concrete
      sizes, with ``requires_grad`` as autograd would set it;
    * ``meta["module_path"]``: dotted path of the module that ran it ("" for the root);
    * ``meta["module_class"]``: qualified class name of that module;
    * ``meta["nn_module_stack"]``, ``meta["stack_trace"]``: as torch.export leaves them;
    * ``meta["no_grad"]``: True inside a ``torch.no_grad`` region.

    ``tensors``: parameters and buffers of the **whole** model (tied ones once, with
    ``aliases``; frozen ones not ``trainable``; buffers outside the state dict not
    ``persistent``), also those of layers that the graph leaves out: see ``runs``.
    ``batched_inputs``: placeholder names whose axis 0 is the batch. ``mutated``: names
    of parameters and buffers that a forward changes in place.
    """

    graph_module: fx.GraphModule
    batch: int
    tensors: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    batched_inputs: tuple[str, ...]
    training: bool
    symbolic: bool
    runs: tuple[LayerRun, ...] = ()
    mutated: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    rebatch: Callable[[int], fx.GraphModule] = field(repr=False, kw_only=True)

    def at_batch(self, batch: int) -> fx.GraphModule:
        """The same graph for ``batch`` samples, every ``meta["val"]`` concrete.

        Nodes, names and order are those of ``graph_module`` where ``symbolic``; where
        the model bakes its batch into the graph, it is traced again.
        """
        if batch == self.batch:
            return self.graph_module
        return self.rebatch(batch)

    def with_batch(self, batch: int) -> TracedModel:
        return replace(self, graph_module=self.at_batch(batch), batch=batch)

    @property
    def parameter_count(self) -> int:
        return sum(t.numel for t in self.tensors if t.kind == "parameter")

    @property
    def trainable_count(self) -> int:
        return sum(t.numel for t in self.tensors if t.trainable)

    @property
    def buffer_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors if t.kind == "buffer")
