"""What a user may hand in as a model.

===============================  ====================================================
a preset name                    ``gpt3-175b`` (see :func:`preset_table`)
an ``nn.Module``                 with ``example_inputs`` (Hugging Face models: without)
a Hugging Face configuration     a JSON file, a folder with ``config.json``, a config
                                 object; ``hf:PATH`` to insist
``torchvision:resnet50``         a builder of torchvision
``timm:vit_base_patch16_224``    a model of timm
``pkg.mod:factory``              a callable that returns a module or (module, args[,
                                 kwargs]); also ``path/to/file.py:factory``
===============================  ====================================================

Nothing is downloaded and no weights are read: models live on the meta device, and a
module that is handed in is copied, never changed.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from passes.meta_copy import meta_copy
from planner import models_hf, models_vision
from planner.errors import PlannerError
from planner.presets import PRESETS

Mode = Literal["train", "infer"]
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be built, on the meta device, with arguments for ``forward``.

    ``build()`` returns (module, args, kwargs). Axis 0 of the tensor arguments is the
    batch, ``batch`` samples of it. ``seq_len`` (tokens a sample) and ``image_size``
    (pixels a side) are 0 where the model has none. ``blocks``: module paths of the
    lists whose elements a pipeline may take as wholes, where the source knows them.
    """

    name: str
    source: str
    build: Callable[[], Built]
    mode: Mode
    dtype: torch.dtype | None
    batch: int = 1
    seq_len: int = 0
    image_size: int = 0
    blocks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """The options of :func:`resolve_model`, checked."""

    mode: Mode
    dtype: torch.dtype | None
    seq_len: int | None
    image_size: int | None
    example_inputs: object
    attention: str


def preset_table() -> tuple[tuple[str, str], ...]:
    """(name, description) of every preset."""
    return tuple((p.name, p.description) for p in PRESETS.values())


def resolve_model(
    model: object,
    *,
    seq_len: int | None = None,
    image_size: int | None = None,
    dtype: torch.dtype | str | None = None,
    mode: Mode = "train",
    example_inputs: object = None,
    attention: str = "sdpa",
) -> ModelSource:
    """Find out what ``model`` is and how to build it (see the module's table).

    Args:
        seq_len: tokens a sample; default: the model's own.
        image_size: pixels a side; default: the model's own.
        dtype: of parameters and floating inputs ("bf16", torch.float32 ...); default:
            bf16 for presets, else the model's own.
        mode: "train" gives the graph with labels and loss where the model computes
            one; "infer" a forward in eval mode.
        example_inputs: a tensor, a tuple of arguments, a mapping of keyword arguments
            or (tuple, mapping). Only for modules and factories.
        attention: attention implementation of Hugging Face models built from a
            configuration ("sdpa", "eager").

    Raises:
        PlannerError: nothing of that name (with the nearest ones), a missing extra, a
            broken file, missing arguments.
    """
    if mode not in ("train", "infer"):
        raise PlannerError("unknown mode", mode, "Use train or infer")
    for name, value in (("seq_len", seq_len), ("image_size", image_size)):
        if value is not None and value < 1:
            raise PlannerError(f"{name} must be at least 1", value)
    request = Request(
        mode, _dtype(dtype), seq_len, image_size, example_inputs, attention
    )
    if isinstance(model, nn.Module):
        return _from_module(model, type(model).__name__, "nn.Module", request)
    if isinstance(model, Path):
        model = str(model)
    if isinstance(model, str):
        return _from_text(model, request)
    if models_hf.is_config(model):
        return _from_hf(model, type(model).__name__, request)
    if callable(model):
        name = str(getattr(model, "__name__", "factory"))
        return _from_factory(cast("Callable[[], object]", model), name, name, request)
    raise PlannerError(
        "not a model",
        type(model).__name__,
        "Give an nn.Module, a preset name, a configuration or pkg.mod:factory",
    )


def _dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    if value not in DTYPES:
        raise PlannerError("unknown dtype", value, f"Known: {', '.join(DTYPES)}")
    return DTYPES[value]


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~name of no such user
        raise PlannerError("no such home folder", text, "Give the path") from error


def _from_text(text: str, request: Request) -> ModelSource:
    if text in PRESETS:
        return _from_preset(text, request)
    kind, _, rest = text.partition(":")
    if kind == "hf" and rest:
        return _from_hf(rest, _path_name(Path(rest)), request)
    if kind in ("torchvision", "timm") and rest:
        found = models_vision.find(kind, rest, request.image_size)
        return _from_vision(found, text, request)
    path = _expanded(text)
    if path.is_dir() or (path.suffix == ".json" and path.exists()):
        return _from_hf(text, _path_name(path), request)
    if path.suffix == ".json":
        raise PlannerError("no such file", text, "Give the path of a config.json")
    module, colon, attribute = text.rpartition(":")
    if colon and module:
        return _from_factory(_load(module, attribute), text, text, request)
    near = difflib.get_close_matches(text.lower(), PRESETS, n=3, cutoff=0.4)
    known = ", ".join(near or PRESETS)
    raise PlannerError(
        "unknown model",
        text,
        f"{'Nearest presets' if near else 'Presets'}: {known}; or a configuration "
        "file, torchvision:NAME, timm:NAME, pkg.mod:factory",
    )


def _path_name(path: Path) -> str:
    """A folder's name; of a file its stem, of a ``config.json`` its folder's."""
    path = path.expanduser().absolute()
    if path.suffix != ".json":
        return path.name
    return path.parent.name if path.name == "config.json" else path.stem


def _from_preset(name: str, request: Request) -> ModelSource:
    preset = PRESETS[name]
    text = preset.unit == "tokens"
    size = (request.seq_len if text else request.image_size) or preset.default_size
    dtype = request.dtype or torch.bfloat16

    def build() -> Built:
        module, kwargs = preset.build(dtype=dtype, size=size, mode=request.mode)
        return module, (), dict(kwargs)

    return ModelSource(
        name=name,
        source="preset",
        build=build,
        mode=request.mode,
        dtype=dtype,
        seq_len=size if text else 0,
        image_size=0 if text else size,
    )


def _from_hf(config: object, name: str, request: Request) -> ModelSource:
    loaded = models_hf.load_config(config)
    size = models_hf.input_sizes(loaded, request.seq_len, request.image_size)
    dtype = request.dtype or models_hf.config_dtype(loaded)

    def build() -> Built:
        model = models_hf.build(loaded, dtype, request.attention)
        return _hf_ready(model, request, dtype, copy=False)

    return ModelSource(
        name=name,
        source=f"hf:{config.removeprefix('hf:')}" if isinstance(config, str) else name,
        build=build,
        mode=request.mode,
        dtype=dtype,
        seq_len=size.seq_len,
        image_size=size.image_size,
    )


def _hf_ready(
    model: nn.Module, request: Request, dtype: torch.dtype | None, copy: bool
) -> Built:
    model = meta_copy(model, dtype) if copy else model
    models_hf.switch_cache_off(model)
    model = model.train(request.mode == "train")
    kwargs = models_hf.example_inputs(
        model, request.seq_len, request.image_size, request.mode == "train"
    )
    return model, (), kwargs


def _from_vision(
    found: models_vision.Found, name: str, request: Request
) -> ModelSource:
    def build() -> Built:
        module = meta_copy(found.build(), request.dtype)
        inputs = tuple(_cast(x, request.dtype) for x in found.inputs())
        return module.train(request.mode == "train"), inputs, {}

    return ModelSource(
        name=name,
        source=name,
        build=build,
        mode=request.mode,
        dtype=request.dtype,
        image_size=found.image_size,
    )


# --- modules and factories ------------------------------------------------------------


def _from_module(
    model: nn.Module, name: str, source: str, request: Request
) -> ModelSource:
    if request.example_inputs is None and models_hf.is_model(model):
        size = models_hf.input_sizes(
            cast("Any", model).config, request.seq_len, request.image_size
        )
        return ModelSource(
            name=name,
            source=source,
            build=lambda: _hf_ready(model, request, request.dtype, copy=True),
            mode=request.mode,
            dtype=request.dtype,
            seq_len=size.seq_len,
            image_size=size.image_size,
        )
    args, kwargs = _split_inputs(request.example_inputs)
    check_arguments(model, args, kwargs)

    def cast_leaf(leaf: Any) -> Any:
        return _cast(leaf, request.dtype)

    inputs = pytree.tree_map(cast_leaf, (args, kwargs))

    def build() -> Built:
        copied = meta_copy(model, request.dtype)
        models_hf.switch_cache_off(copied)
        return copied.train(request.mode == "train"), inputs[0], inputs[1]

    first = _first_tensor(args, kwargs)
    assert first is not None, "check_arguments found a tensor"
    ids = first.dim() == 2 and not first.is_floating_point()
    return ModelSource(
        name=name,
        source=source,
        build=build,
        mode=request.mode,
        dtype=request.dtype,
        batch=int(first.shape[0]),
        seq_len=int(first.shape[1]) if ids else 0,
        image_size=int(first.shape[-1]) if first.dim() == 4 else 0,
    )


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf
    return None


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    floating = dtype is not None and value.is_floating_point()
    kind = dtype if floating else value.dtype
    return torch.empty(value.shape, dtype=kind, device="meta")


def _split_inputs(given: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) from whatever form the example inputs have."""
    if given is None:
        return (), {}
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(cast("Mapping[str, Any]", given))
    if isinstance(given, tuple | list):
        items: tuple[Any, ...] = tuple(cast("tuple[Any, ...]", given))
        if len(items) == 2 and isinstance(items[1], Mapping):
            args, kwargs = items
            if isinstance(args, tuple | list):
                return tuple(cast("tuple[Any, ...]", args)), dict(kwargs)
        return items, {}
    raise PlannerError(
        "example inputs of an unknown form",
        type(given).__name__,
        "Give a tensor, a tuple, a dict or (tuple, dict)",
    )


def check_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise :class:`PlannerError` naming what ``forward`` still needs."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise PlannerError(
            f"{type(model).__name__}.forward does not take these example inputs",
            str(error),
            f"It takes: {names}",
        ) from error
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind not in variadic
        and parameter.default is inspect.Parameter.empty
        and name not in bound.arguments
    ]
    if missing or _first_tensor(args, kwargs) is None:
        raise PlannerError(
            f"{type(model).__name__} needs inputs that it did not get",
            ", ".join(missing) or ", ".join(signature.parameters),
            "Give example_inputs (tensors whose first axis is the batch), or a factory "
            "that returns (module, args, kwargs)",
        )


def _load(module: str, attribute: str) -> Callable[[], object]:
    """The callable ``attribute`` of a module or a Python file."""
    text = f"{module}:{attribute}"
    try:
        loaded = _load_file(module) if module.endswith(".py") else _import(module)
    except (ImportError, FileNotFoundError, SyntaxError) as error:
        raise PlannerError("can not import the factory", text, str(error)) from error
    found = getattr(loaded, attribute, None)
    if not callable(found):
        names = [n for n in dir(loaded) if n[0] != "_" and callable(getattr(loaded, n))]
        near = difflib.get_close_matches(attribute, names, n=3, cutoff=0.3)
        raise PlannerError(
            "no such factory", text, f"Found there: {', '.join(near or names[:8])}"
        )
    return cast("Callable[[], object]", found)


def _import(name: str) -> Any:
    """Import with the working directory in the path, as ``python -m`` would."""
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove("")


def _load_file(path: str) -> Any:
    file = Path(path).expanduser()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.exists():
        raise FileNotFoundError(f"no file {path}")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _from_factory(
    factory: Callable[[], object], name: str, source: str, request: Request
) -> ModelSource:
    made = _call(factory, name)
    if isinstance(made, nn.Module):
        return _from_module(made, name, source, request)
    items: tuple[Any, ...] = ()
    kind = type(made).__name__
    if isinstance(made, tuple):
        items = cast("tuple[Any, ...]", made)
    if len(items) not in (2, 3) or not isinstance(items[0], nn.Module):
        raise PlannerError(
            "the factory must return a module or (module, args[, kwargs])",
            f"{name} returned {kind}",
        )
    if request.example_inputs is None:
        args, kwargs = _split_inputs(items[1])
        kwargs |= items[2] if len(items) == 3 else {}
        request = replace(request, example_inputs=(args, kwargs))
    return _from_module(items[0], name, source, request)


def _call(factory: Callable[[], object], name: str) -> object:
    """Call on the meta device; where the model reads values as it is built, on CPU."""
    try:
        with torch.device("meta"):
            return factory()
    except Exception:
        try:
            return factory()
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else ""
            raise PlannerError(
                "the model factory failed", name, f"{type(error).__name__}: {first}"
            ) from error
