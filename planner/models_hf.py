"""Hugging Face models from their configuration: no hub, no weights.

The only file that imports transformers, and only when such a model is asked for.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from planner.errors import PlannerError

_DEFAULT_TOKENS = 2048
_DEFAULT_PIXELS = 224
_TOKEN_LABELS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForPreTraining",
    "ForConditionalGeneration",
    "ForTokenClassification",
)
_CLASS_LABELS = ("ForSequenceClassification", "ForImageClassification")
_AUTO = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)


@dataclass(frozen=True, slots=True)
class InputSizes:
    seq_len: int
    image_size: int


def _of_transformers(value: object, name: str) -> bool:
    return any(
        base.__module__.startswith("transformers.") and base.__name__ == name
        for base in type(value).__mro__
    )


def is_config(value: object) -> bool:
    return _of_transformers(value, "PreTrainedConfig") or _of_transformers(
        value, "PretrainedConfig"
    )


def is_model(value: object) -> bool:
    return _of_transformers(value, "PreTrainedModel")


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise PlannerError(
            "Hugging Face models need transformers",
            "not installed",
            "pip install parallel-planner[hf]",
        ) from error


def load_config(source: object) -> Any:
    """A configuration object from a JSON file, a folder or such an object."""
    if not isinstance(source, str):
        return source
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise PlannerError(
            "no Hugging Face configuration",
            source,
            "Give a config.json or its folder; nothing is downloaded",
        )
    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlannerError("not a JSON file", str(file), str(error)) from error
    known = cast("dict[str, Any]", values) if isinstance(values, dict) else {}
    kind: object = known.get("model_type")
    mapping = _transformers().CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in mapping:
        raise PlannerError(
            "not a known model_type",
            f"{kind!r} in {file}",
            "Use a configuration of the installed transformers version",
        )
    try:
        return mapping[kind].from_dict(known)
    except Exception as error:  # whatever a configuration class checks
        raise PlannerError(
            "not a valid configuration",
            str(file),
            " ".join(str(error).split()),
        ) from error


def config_dtype(config: Any) -> torch.dtype | None:
    value = getattr(config, "dtype", None)
    if isinstance(value, str):
        value = getattr(torch, value, None)
    return value if isinstance(value, torch.dtype) else None


def _text_config(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return get() if callable(get) else config


def _positions(config: Any) -> int | None:
    inner = _text_config(config)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        value = getattr(inner, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _pixels(config: Any) -> int | None:
    for owner in (config, getattr(config, "vision_config", None)):
        value: Any = getattr(owner, "image_size", None)
        if isinstance(value, list | tuple) and value:
            value = cast("Any", value)[0]
        if isinstance(value, int):
            return value
    return None


def input_sizes(config: Any, seq_len: int | None, image_size: int | None) -> InputSizes:
    """Tokens and pixels of one sample; 0 where the model reads none."""
    limit = _positions(config)
    text = hasattr(_text_config(config), "vocab_size")
    pixels = _pixels(config)
    vision = pixels is not None or not text
    tokens = seq_len or min(limit or _DEFAULT_TOKENS, _DEFAULT_TOKENS)
    if text and limit is not None and tokens > limit and _learned_positions(config):
        raise PlannerError(
            "seq_len is longer than the model's positions",
            f"{tokens} > {limit}",
            "Use a shorter seq_len or a configuration with more positions",
        )
    return InputSizes(
        seq_len=tokens if text else 0,
        image_size=(image_size or pixels or _DEFAULT_PIXELS) if vision else 0,
    )


def _learned_positions(config: Any) -> bool:
    inner = _text_config(config)
    rotary = hasattr(inner, "rope_theta") or hasattr(inner, "rope_parameters")
    return not rotary


def model_class(config: Any) -> Any:
    """The class that ``architectures`` names, else the fitting Auto class."""
    library = _transformers()
    for name in getattr(config, "architectures", None) or ():
        found = getattr(library, name, None)
        if found is not None:
            return found
    for name in _AUTO:
        auto = getattr(library, name)
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise PlannerError(
        "no model class for this configuration",
        type(config).__name__,
        "Name one in `architectures`, or hand in the module",
    )


def build(config: Any, dtype: torch.dtype | None, attention: str) -> nn.Module:
    """The model on the meta device, with ``attention`` where the model offers it."""
    config = copy.deepcopy(config)
    start = getattr(config, "decoder_start_token_id", None)
    if getattr(config, "is_encoder_decoder", False) and start is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    chosen = model_class(config)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if isinstance(chosen, tuple | list):
        chosen = cast("Any", chosen)[0]
    with torch.device("meta"):
        try:
            return chosen._from_config(config, attn_implementation=attention, **options)
        except (ValueError, ImportError):
            return chosen._from_config(config, attn_implementation="eager", **options)


def _configs(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield config


def switch_cache_off(model: nn.Module) -> None:
    """Key-value caches can not leave a traced graph; training needs none."""
    for config in _configs(model):
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


def example_inputs(
    model: nn.Module, seq_len: int | None, image_size: int | None, train: bool
) -> dict[str, Tensor]:
    """Keyword arguments for one sample, with labels where they give the loss.

    Raises:
        PlannerError: the model needs arguments that can not be guessed.
    """
    config: Any = cast("Any", model).config
    sizes = input_sizes(config, seq_len, image_size)
    parameters = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "input_ids"))
    name = type(model).__name__
    device = torch.device("meta")
    ids = torch.empty(1, sizes.seq_len, dtype=torch.long, device=device)
    kwargs: dict[str, Tensor] = {}
    if main == "input_ids":
        kwargs[main] = ids
    elif main == "pixel_values":
        channels = int(getattr(config, "num_channels", 3) or 3)
        side = sizes.image_size or _DEFAULT_PIXELS
        kwargs[main] = torch.empty(
            1, channels, side, side, dtype=_float_dtype(model), device=device
        )
    else:
        raise PlannerError(
            f"{name} needs inputs that it did not get", main, "Give example_inputs"
        )
    if train and "labels" in parameters and name.endswith(_TOKEN_LABELS):
        kwargs["labels"] = ids
    elif train and "labels" in parameters and name.endswith(_CLASS_LABELS):
        kwargs["labels"] = torch.empty(1, dtype=torch.long, device=device)
    decoder = getattr(config, "is_encoder_decoder", False)
    if decoder and "labels" not in kwargs and "decoder_input_ids" in parameters:
        kwargs["decoder_input_ids"] = ids
    return kwargs


def _float_dtype(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32
