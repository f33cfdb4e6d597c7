"""Graphs of a model: traced once per process, precision and sequence length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from passes.conv_to_gemm import materialize
from passes.ir import OpGraph
from passes.pipeline import run_passes
from passes.trace import trace
from planner.errors import PlannerError
from planner.models import ModelSource
from planner.search.job import scaled_context

#: Dtype of parameters and activations in the graph; fp8 quantises inside the products.
TRACED_DTYPE = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "bf16",
    "fp32": "fp32",
    "tf32": "fp32",
}
_KEPT = 64
_cache: OrderedDict[Hashable, OpGraph] = OrderedDict()


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A model whose graphs are wanted. ``text`` names it again (None: an object);
    ``resolve(seq_len)`` gives it at another sequence length; ``im2col`` writes the
    patches of convolutions to memory."""

    source: ModelSource
    resolve: Callable[[int | None], ModelSource]
    text: str | None
    dump_dir: str | Path | None = None
    im2col: bool = False

    def graph(self) -> OpGraph:
        """The whole model's graph, one sample per micro-batch where it can be."""
        return self._traced(self.source)

    def at_cp(self, cp: int) -> OpGraph:
        """The graph of one of ``cp`` sequence chunks; attention sees all keys."""
        length = self.source.seq_len
        if not length or length % cp:
            raise PlannerError(
                "the sequence does not divide over cp", f"{length} over {cp}"
            )
        return scaled_context(self._traced(self.resolve(length // cp)), cp)

    def _traced(self, source: ModelSource) -> OpGraph:
        key = None
        if self.text is not None:
            key = (
                self.text,
                source.seq_len,
                source.image_size,
                source.dtype,
                source.mode,
                self.im2col,
            )
        if key is not None and key in _cache and self.dump_dir is None:
            _cache.move_to_end(key)
            return _cache[key]
        module, args, kwargs = source.build()
        traced = trace(
            module,
            args,
            kwargs,
            batch=1,
            training=source.mode == "train",
        )
        if self.im2col:
            traced = materialize(traced)
        graph = run_passes(traced, self.dump_dir)
        if source.seq_len and not graph.seq_len:
            graph = replace(graph, seq_len=source.seq_len)
        if key is not None:
            _cache[key] = graph
            while len(_cache) > _KEPT:
                _cache.popitem(last=False)
        return graph
