"""The ordered passes from a traced model to its operator graph.

Read top to bottom: this tuple is the compiler front end. Every boundary can be dumped
as text (``--dump-passes DIR``): one file per pass, numbered in order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from passes.backward import annotate_saved
from passes.cluster_layers import cluster_layers
from passes.expand import expand
from passes.format import format_graph
from passes.fuse import fuse
from passes.ir import OpGraph
from passes.lower import lower
from passes.traced import TracedModel

GraphPass = Callable[[OpGraph, TracedModel], OpGraph]


def _saved(graph: OpGraph, traced: TracedModel) -> OpGraph:
    return annotate_saved(graph, traced)


def _expand(graph: OpGraph, traced: TracedModel) -> OpGraph:
    return expand(graph, traced.runs)


def _cluster(graph: OpGraph, _: TracedModel) -> OpGraph:
    return cluster_layers(graph)


def _fuse(graph: OpGraph, _: TracedModel) -> OpGraph:
    return fuse(graph)


GRAPH_PASSES: tuple[tuple[str, GraphPass], ...] = (
    ("saved", _saved),
    ("expand", _expand),
    ("cluster_layers", _cluster),
    ("fuse", _fuse),
)


def run_passes(traced: TracedModel, dump_dir: str | Path | None = None) -> OpGraph:
    """Lower a traced model and run every graph pass.

    ``dump_dir`` receives the graph's text after each pass. Raises
    :class:`passes.errors.PassError` for a model that can not be lowered.
    """
    graph = lower(traced)
    _dump(dump_dir, 0, "lower", graph)
    for number, (name, graph_pass) in enumerate(GRAPH_PASSES, start=1):
        graph = graph_pass(graph, traced)
        _dump(dump_dir, number, name, graph)
    return graph


def _dump(folder: str | Path | None, number: int, name: str, graph: OpGraph) -> None:
    if folder is None:
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{number:02d}-{name}.txt").write_text(format_graph(graph))
