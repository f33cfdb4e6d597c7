"""nn.Module -> aten graph by torch.export on meta tensors.

The user's module is never run on data and never changed: a copy whose tensors live on
the meta device is exported, with runs of equal layers shortened (:mod:`passes.depth`).
There is no fallback to an eager forward.
"""

from __future__ import annotations

import inspect
import io
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.accounting import module_tensors
from passes.concrete import (
    allows,
    concrete_graph,
    is_symbolic,
    mutated_tensors,
    plain_graph,
)
from passes.depth import (
    UnequalLayers,
    Watch,
    check_units_equal,
    find_runs,
    remove_stand_ins,
    shorten,
)
from passes.errors import PassError
from passes.export_errors import explain
from passes.meta_copy import meta_copy
from passes.traced import LayerRun as LayerRun
from passes.traced import TracedModel as TracedModel

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_SMALLEST_SYMBOLIC = 2  # torch.export never makes sizes 0 and 1 symbolic


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch: int | None = None,
    dtype: torch.dtype | None = None,
    training: bool = True,
    strict: bool = False,
    shorten_runs: bool = True,
) -> TracedModel:
    """Export ``model`` for ``batch`` samples (default: the example's).

    Axis 0 of every tensor argument whose size equals the example's batch (axis 0 of
    the first tensor argument) is the batch; values of the examples do not matter.
    ``dtype`` casts floating parameters, buffers and inputs. ``training=False`` exports
    under ``torch.no_grad``; the model's own train/eval mode is kept. ``strict`` is
    torch.export's (off first, and tried where the other mode fails).
    ``shorten_runs=False`` traces every layer.

    Raises:
        PassError: the model can not be exported; names the op, the line of the user's
            model and what to do.
    """
    job = _Job.of(model, args, dict(kwargs or {}), dtype, training, strict)
    size = job.example_batch if batch is None else batch
    if size < 1:
        raise PassError("batch must be at least 1", size)
    runs = find_runs(model) if shorten_runs and not strict else ()
    template, warnings = _export_checked(job, max(size, _SMALLEST_SYMBOLIC), runs)
    if not template.symbolic and template.batch != size:
        template, more = _export_checked(job, size, template.runs, dynamic=False)
        warnings += more

    def rebatch(other: int) -> fx.GraphModule:
        if template.symbolic and allows(template.module, other):
            return concrete_graph(template.module, other, training)
        if other == template.batch:
            return concrete_graph(template.module, other, training)
        again, _ = _export_checked(job, other, template.runs, dynamic=False)
        return concrete_graph(again.module, other, training)

    graph_module = rebatch(size)
    nodes = graph_module.graph.find_nodes(op="placeholder")
    return TracedModel(
        graph_module=graph_module,
        batch=size,
        tensors=job.tensors,
        inputs=tuple(n.name for n in nodes),
        batched_inputs=tuple(n.name for n in nodes if _leading(n.meta["val"]) == size),
        training=training,
        symbolic=template.symbolic,
        runs=template.runs,
        mutated=mutated_tensors(graph_module),
        warnings=(*warnings, *_provenance(template.runs)),
        rebatch=rebatch,
    )


def _provenance(runs: Sequence[LayerRun]) -> Iterator[str]:
    for run in runs:
        yield (
            f"traced {len(run.kept)} of {len(run.original)} layers of "
            f"{run.prefix or 'the model'}: the others are equal"
        )


# --- inputs ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """What is exported, whatever the batch."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype | None
    training: bool
    strict: bool
    example_batch: int
    tensors: tuple[Any, ...]
    aliases: dict[str, str]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype | None,
        training: bool,
        strict: bool,
    ) -> _Job:
        _check_arguments(model, args, kwargs)
        tensors = module_tensors(model, dtype)
        aliases = {a: t.name for t in tensors for a in t.aliases}
        example = _example_batch(args, kwargs)
        return cls(
            model, args, kwargs, dtype, training, strict, example, tensors, aliases
        )

    def inputs(self, batch: int) -> Inputs:
        """The example's arguments on the meta device, for ``batch`` samples."""

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = list(leaf.shape)
            if shape and shape[0] == self.example_batch:
                shape[0] = batch
            cast = self.dtype is not None and leaf.is_floating_point()
            kind = self.dtype if cast else leaf.dtype
            return torch.empty(shape, dtype=kind, device="meta")

        return pytree.tree_map(one, (tuple(self.args), dict(self.kwargs)))


def _check_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise PassError(
            f"{type(model).__name__}.forward can not be called with the example inputs",
            str(error),
            "Give example inputs for these arguments",
        ) from error


def _leading(value: object) -> int | None:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return int(value.shape[0])
    return None


def _example_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        size = _leading(leaf)
        if size is not None:
            return size
    raise PassError(
        "no example input is a tensor with a batch axis",
        fix="Give example inputs whose first axis is the batch",
    )


def _dynamic_shapes(model: nn.Module, inputs: Inputs, batch: int) -> dict[str, Any]:
    """Axis 0 of batched arguments automatic, in the form that torch.export follows."""
    signature = inspect.signature(model.forward)
    bound = dict(signature.bind(*inputs[0], **inputs[1]).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and name in bound:
            bound.update(bound.pop(name))

    def axes(leaf: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if _leading(leaf) == batch else None

    return pytree.tree_map(axes, bound)


# --- export ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Template:
    """A clean graph, symbolic in the batch where the model allows."""

    module: fx.GraphModule
    batch: int
    symbolic: bool
    runs: tuple[LayerRun, ...]


def _export_checked(
    job: _Job, batch: int, runs: tuple[LayerRun, ...], dynamic: bool = True
) -> tuple[_Template, list[str]]:
    """Export with as many shortened runs as pass their checks."""
    warnings: list[str] = []
    while True:
        try:
            return _export(job, batch, runs, dynamic), warnings
        except UnequalLayers as error:
            warnings.append(f"traced every layer of {error}")
            runs = tuple(r for r in runs if r is not error.run)
        except Exception as error:
            if not runs:
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.append(f"traced every layer, as shortened lists failed: {first}")
            runs = ()


def _export(
    job: _Job, batch: int, runs: tuple[LayerRun, ...], dynamic: bool
) -> _Template:
    if job.strict:
        exported = _attempt(job, batch, (), dynamic=False, strict=True)
        return _template(job, exported, batch, ())
    try:
        exported = _attempt(job, batch, runs, dynamic=dynamic)
    except UnequalLayers:
        raise
    except Exception as first:
        if runs:
            raise
        exported = _export_otherwise(job, batch, first, dynamic)
    return _template(job, exported, batch, runs)


def _export_otherwise(
    job: _Job, batch: int, first: Exception, dynamic: bool
) -> torch.export.ExportedProgram:
    """With a fixed batch, then in strict mode; else the first error, explained."""
    for strict in (False, True) if dynamic else (True,):
        try:
            return _attempt(job, batch, (), dynamic=False, strict=strict)
        except Exception as error:
            if not strict:
                first = error
    raise explain(first, job.model) from first


def _attempt(
    job: _Job,
    batch: int,
    runs: tuple[LayerRun, ...],
    *,
    dynamic: bool,
    strict: bool = False,
) -> torch.export.ExportedProgram:
    model = meta_copy(shorten(job.model, runs) if runs else job.model, job.dtype)
    watches = [Watch(run) for run in runs]
    for watch in watches:
        watch.attach(model)
    inputs = job.inputs(batch)
    shapes = _dynamic_shapes(model, inputs, batch) if dynamic else None
    with _quiet(), nullcontext() if job.training else torch.no_grad():
        exported = torch.export.export(
            model, *inputs, dynamic_shapes=shapes, strict=strict
        )
    for watch in watches:
        if not watch.finished():
            raise watch.fail("not every layer was called")
    return exported


@contextmanager
def _quiet() -> Generator[None]:
    """Without torch.export's log lines and prints: what matters is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _template(
    job: _Job,
    exported: torch.export.ExportedProgram,
    batch: int,
    runs: tuple[LayerRun, ...],
) -> _Template:
    module = plain_graph(exported, job.aliases)
    for run in runs:
        remove_stand_ins(module.graph, run)
        check_units_equal(module.graph, run)
    if runs:
        module.graph.eliminate_dead_code()
    module.recompile()
    return _Template(module, batch, is_symbolic(module, batch), runs)
