"""From a user's call to the graph's placeholders, one micro-batch at a time."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from passes.traced import TracedModel
from planner.errors import PlannerError

Values = dict[str, Tensor]


def _leaves(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Leaves of a call by argument name and path."""
    bound = signature.bind(*args, **kwargs)
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        items = {name: value}
        if parameter.kind is parameter.VAR_KEYWORD:
            items = dict(value)
        for key, item in items.items():
            for path, leaf in pytree.tree_flatten_with_path(item)[0]:
                found[key + pytree.keystr(path)] = leaf
    return found


@dataclass(frozen=True, slots=True)
class InputMap:
    """Which leaf of a call each placeholder is, and which of them carry samples."""

    signature: inspect.Signature
    places: tuple[tuple[str, str], ...]  # placeholder, leaf
    batched: frozenset[str]
    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls, model: nn.Module, traced: TracedModel, args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> InputMap:  # fmt: skip
        """From the example call that was traced."""
        signature = inspect.signature(model.forward)
        nodes = traced.graph_module.graph.find_nodes(op="placeholder")
        by_leaf = _leaves(signature, args, kwargs)
        assert len(by_leaf) == len(nodes), (list(by_leaf), [n.name for n in nodes])
        places = tuple(
            (node.name, leaf)
            for node, leaf in zip(nodes, by_leaf, strict=True)
            if isinstance(node.meta.get("val"), Tensor)
        )
        values = {n.name: n.meta["val"] for n in nodes}
        return cls(
            signature,
            places,
            frozenset(traced.batched_inputs),
            {n: values[n].dtype for n, _ in places},
            {n: tuple(values[n].shape) for n, _ in places},
        )

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
    ) -> Values:
        """The placeholders' tensors for all of this rank's samples."""
        leaves = _leaves(self.signature, args, kwargs)
        result: Values = {}
        for name, leaf in self.places:
            value = leaves.get(leaf)
            if not isinstance(value, Tensor):
                raise PlannerError(
                    "a call without an input of the traced model", leaf, "pass a tensor"
                )
            result[name] = value.to(device, self.dtypes[name])
        return result

    def micro(self, values: Values, index: int, size: int) -> Values:
        """One micro-batch of bound inputs."""
        result: Values = {}
        for name, value in values.items():
            if name in self.batched:
                value = value[index * size : (index + 1) * size]
            if tuple(value.shape) != self.shapes[name]:
                raise PlannerError(
                    "an input has another shape than the plan's",
                    f"{name}: {tuple(value.shape)} in place of {self.shapes[name]}",
                    "give this rank's samples of the global batch, as planned",
                )
            result[name] = value
        return result
