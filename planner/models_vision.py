"""torchvision and timm models, without weights."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import PlannerError

_FRAMES = 16
_SIZES = {"inception_v3": 299, "raft_large": 256, "raft_small": 256}


@dataclass(frozen=True, slots=True)
class Found:
    """A vision model: how to build it and the arguments for one sample."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    image_size: int


def find(library: str, name: str, image_size: int | None) -> Found:
    """A model of ``torchvision`` or ``timm`` by name.

    Raises:
        PlannerError: the library is not installed, or no model of that name.
    """
    module = _import(library)
    lookup = _torchvision if library == "torchvision" else _timm
    return lookup(module, name, image_size)


def _import(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise PlannerError(
            f"{library}:NAME needs {library}",
            "not installed",
            "pip install parallel-planner[vision]",
        ) from error


def _unknown(library: str, name: str, names: list[str]) -> PlannerError:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    fix = f"Nearest: {', '.join(near)}" if near else f"{library} lists its models"
    return PlannerError(f"no {library} model of that name", name, fix)


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """On the meta device; a model that reads values as it is built, on the CPU."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):
        return build()


def _torchvision(library: Any, name: str, image_size: int | None) -> Found:
    models = library.models
    names: list[str] = list(models.list_models())
    if name not in names:
        raise _unknown("torchvision", name, names)
    video = name in models.list_models(module=models.video)
    flow = name in models.list_models(module=models.optical_flow)
    side = image_size or _SIZES.get(name) or (112 if "3d_18" in name else 224)
    options: dict[str, Any] = {"weights": None}
    if name in models.list_models(module=models.segmentation) or (
        name in models.list_models(module=models.detection)
    ):
        options["weights_backbone"] = None
    if image_size is not None and name.startswith("vit_"):
        options["image_size"] = image_size

    def inputs() -> tuple[Tensor, ...]:
        image = torch.empty(1, 3, side, side, device="meta")
        if video:
            return (torch.empty(1, 3, _FRAMES, side, side, device="meta"),)
        return (image, image) if flow else (image,)

    return Found(
        lambda: _on_meta(lambda: models.get_model(name, **options)), inputs, side
    )


def _timm(library: Any, name: str, image_size: int | None) -> Found:
    names: list[str] = list(library.list_models())
    if name.partition(".")[0] not in names:
        raise _unknown("timm", name, names)
    default: Any = library.get_pretrained_cfg(name)
    shape: tuple[int, ...] = tuple(getattr(default, "input_size", (3, 224, 224)))
    side = image_size or shape[-1]

    def build() -> nn.Module:
        if image_size is None:
            return library.create_model(name, pretrained=False)
        try:
            return library.create_model(name, pretrained=False, img_size=image_size)
        except TypeError:
            return library.create_model(name, pretrained=False)

    def inputs() -> tuple[Tensor, ...]:
        return (torch.empty(1, shape[0], side, side, device="meta"),)

    return Found(lambda: _on_meta(build), inputs, side)
