"""What a team runs today, read from its own configuration, as a Parallelism.

``megatron-args`` (a text or shell file with Megatron-LM options), ``torchtitan.toml``
and ``deepspeed.json``. The files are data: nothing in them is executed. What has no
counterpart is listed in ``ignored``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from planner.errors import PlannerError
from planner.workload import Parallelism, Precision

MAX_FILE_BYTES = 2**20
FORMATS = ("megatron-args", "torchtitan.toml", "deepspeed.json")


@dataclass(frozen=True, slots=True)
class Imported:
    """A configuration as found. ``None``: the file does not say."""

    format: str
    parallelism: Parallelism
    global_batch: int | None = None
    seq_len: int | None = None
    precision: Precision | None = None
    optimizer: str | None = None
    ignored: tuple[str, ...] = ()


def read(path: str | Path, num_gpus: int, format: str | None = None) -> Imported:
    """The configuration in ``path`` on ``num_gpus`` ranks.

    ``format``: one of :data:`FORMATS`; None takes it from the file's name. Raises
    PlannerError where the file can not be read or does not divide the ranks.
    """
    file = Path(path)
    kind = format or _format_of(file)
    text = _text(file)
    readers: dict[str, Callable[[str, int], Imported]] = {
        "megatron-args": megatron_args,
        "torchtitan.toml": torchtitan_toml,
        "deepspeed.json": deepspeed_json,
    }
    if kind not in readers:
        raise PlannerError("unknown format", kind, f"use {', '.join(FORMATS)}")
    return readers[kind](text, num_gpus)


def _format_of(file: Path) -> str:
    name = file.suffix.lower()
    if name == ".toml":
        return "torchtitan.toml"
    if name == ".json":
        return "deepspeed.json"
    return "megatron-args"


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise PlannerError("the file is too large", file, "at most 1 MiB")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PlannerError(
            f"can not read the file ({error.strerror})", file, "give another path"
        ) from error
    except UnicodeDecodeError as error:
        raise PlannerError("the file is not text", file, "give UTF-8") from error


def _whole(what: str, value: object) -> int:
    if isinstance(value, bool):
        raise PlannerError(f"{what} is not a whole number", value)
    try:
        number = int(str(value))
    except ValueError as error:
        raise PlannerError(f"{what} is not a whole number", value) from error
    if not 0 < number < 2**31:
        raise PlannerError(f"{what} is out of range", value)
    return number


def _data_ranks(num_gpus: int, **degrees: int) -> int:
    """Ranks that are left for data parallelism."""
    product = 1
    for size in degrees.values():
        product *= size
    if num_gpus % product:
        shown = " x ".join(f"{k} {v}" for k, v in degrees.items())
        raise PlannerError(
            "the configuration does not divide the cluster",
            f"{shown} = {product} of {num_gpus} GPUs",
            "give the cluster that it runs on",
        )
    return num_gpus // product


# ---- Megatron --------------------------------------------------------------------

_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def megatron_args(text: str, num_gpus: int) -> Imported:
    """Options of Megatron-LM, in a file of arguments or a launch script."""
    said = _options(text)
    take = _Taker(said)
    tp = take.number("--tensor-model-parallel-size", 1)
    pp = take.number("--pipeline-model-parallel-size", 1)
    cp = take.number("--context-parallel-size", 1)
    ep = take.number("--expert-model-parallel-size", 1)
    layers = take.number("--num-layers", 0)
    data = _data_ranks(num_gpus, tp=tp, pp=pp, cp=cp)
    vpp = take.number("--num-virtual-stages-per-pipeline-rank", 0)
    per_chunk = take.number("--num-layers-per-virtual-pipeline-stage", 0)
    if not vpp:
        vpp = layers // (pp * per_chunk) if layers and per_chunk and pp > 1 else 1
    per_stage: tuple[int, ...] | None = None
    if "--pipeline-model-parallel-layout" in said:
        per_stage, vpp = _layout(take.text("--pipeline-model-parallel-layout"), pp)
    asked = _megatron_zero(take)
    zero = asked if data * cp > 1 else 0
    instances = take.number("--num-distributed-optimizer-instances", 1)
    shard = _data_ranks(data, instances=instances) if zero or ep > 1 else 1
    micro = take.number("--micro-batch-size", 1)
    batch = take.number("--global-batch-size", micro * data)
    parallelism = Parallelism(
        pp=pp,
        dp_replicate=data // shard,
        dp_shard=shard,
        cp=cp,
        ep=ep,
        tp=tp,
        vpp=max(1, vpp),
        sequence_parallel=take.flag("--sequence-parallel"),
        zero=zero,
        micro_batch_size=micro,
        schedule="interleaved" if vpp > 1 else "1f1b",
        recompute=_megatron_recompute(take, layers, pp, max(1, vpp)),
        layers_per_stage=per_stage,
    )
    fp8 = take.text("--fp8-format") or take.text("--fp8-recipe")
    bf16, fp16 = take.flag("--bf16"), take.flag("--fp16")
    precision: Precision = "fp8" if fp8 else "bf16" if bf16 else "fp16" if fp16 else "fp32"  # noqa: E501  # fmt: skip
    return Imported(
        "megatron-args",
        parallelism,
        batch,
        take.number("--seq-length", 0) or None,
        precision,
        {"adam": "adamw", "sgd": "sgd"}.get(take.text("--optimizer") or "adam"),
        take.rest(),
    )


def _options(text: str) -> dict[str, str]:
    """Option to value; shell comments, continuations and quotes are understood."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlannerError("the arguments can not be read", error) from error
    said: dict[str, str] = {}
    current: str | None = None
    for word in words:
        name, equals, value = word.partition("=")
        if _OPTION.fullmatch(name):
            current = name
            said[name] = value if equals else ""
        elif current is not None and not said[current]:
            said[current] = word.strip("()")
    return said


class _Taker:
    """Hands out options and remembers which were asked for."""

    def __init__(self, said: Mapping[str, str]) -> None:
        self.said, self.asked = said, set[str]()

    def number(self, name: str, default: int) -> int:
        self.asked.add(name)
        return _whole(name, self.said[name]) if name in self.said else default

    def text(self, name: str) -> str:
        self.asked.add(name)
        return self.said.get(name, "")

    def flag(self, name: str) -> bool:
        self.asked.add(name)
        return name in self.said

    def rest(self) -> tuple[str, ...]:
        """Options that no one asked for."""
        return tuple(n for n in self.said if n not in self.asked)


def _megatron_zero(take: _Taker) -> int:
    distributed = take.flag("--use-distributed-optimizer")
    strategy = take.text("--data-parallel-sharding-strategy")
    if take.flag("--use-megatron-fsdp") or take.flag("--use-custom-fsdp"):
        levels = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        if strategy not in levels:
            raise PlannerError("unknown sharding strategy", strategy or "none given")
        return levels[strategy]
    if take.flag("--use-torch-fsdp2"):
        return 3
    return int(distributed)


def _megatron_recompute(take: _Taker, layers: int, pp: int, vpp: int) -> Any:
    granularity = take.text("--recompute-granularity")
    method = take.text("--recompute-method")
    count = take.number("--recompute-num-layers", 1)
    if take.flag("--recompute-activations") or granularity == "selective":
        return "selective"
    if granularity != "full":
        return "none"
    if method == "block" and layers:
        return tuple(min(count * vpp, layers // pp) for _ in range(pp))
    return "full"


def _layout(text: str, pp: int) -> tuple[tuple[int, ...] | None, int]:
    """Layers per rank and chunks per rank of Megatron's layout notation."""
    plain = re.sub(
        r"\(([^()]*)\)\*(\d{1,4})", lambda m: m[1] * int(m[2]), text.replace(",", "")
    )
    plain = re.sub(r"([a-zA-Z])\*(\d{1,4})", lambda m: m[1] * int(m[2]), plain)
    parts = plain.split("|")
    if len(parts) % pp or not re.fullmatch(r"[EtmL|]*", plain):
        raise PlannerError("the pipeline layout can not be read", text)
    vpp = len(parts) // pp
    if vpp > 1:
        return None, vpp
    return tuple(part.count("t") for part in parts), 1


# ---- torchtitan ------------------------------------------------------------------


def torchtitan_toml(text: str, num_gpus: int) -> Imported:
    """A torchtitan job file (0.1 and 0.2)."""
    data = _toml(text)
    par, training = _table(data, "parallelism"), _table(data, "training")

    def degree(name: str, default: int = 1) -> int:
        value = par.get(name, default)
        return default if value == -1 else _whole(name, value)

    tp, pp = degree("tensor_parallel_degree"), degree("pipeline_parallel_degree")
    cp, ep = degree("context_parallel_degree"), degree("expert_parallel_degree")
    replicate = degree("data_parallel_replicate_degree")
    rest = _data_ranks(num_gpus, tp=tp, pp=pp, cp=cp, dp_replicate=replicate)
    shard = degree("data_parallel_shard_degree", rest)
    _data_ranks(num_gpus // (tp * pp * cp * replicate), dp_shard=shard)
    if shard != rest:
        raise PlannerError(
            "the configuration does not fill the cluster",
            f"{num_gpus // rest * shard} of {num_gpus} GPUs",
            "give the cluster that it runs on",
        )
    local = _whole("local_batch_size", training.get("local_batch_size", 8))
    micro = local
    if pp > 1:
        micro = degree("pipeline_parallel_microbatch_size")
    batch = training.get("global_batch_size", -1)
    name = str(par.get("pipeline_parallel_schedule", "1F1B"))
    schedules = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved"}
    schedules |= {
        "zbvzerobubble": "zero_bubble",
        "interleavedzerobubble": "zero_bubble",
    }
    if name.lower() not in schedules:
        raise PlannerError("unknown schedule", name, "use 1F1B, GPipe, Interleaved1F1B")
    schedule = schedules[name.lower()] if pp > 1 else "1f1b"
    parts = par.get("module_fqns_per_model_part")
    vpp = 2 if schedule == "interleaved" else 1
    if isinstance(parts, list) and len(cast("list[Any]", parts)) % pp == 0:
        vpp = len(cast("list[Any]", parts)) // pp if pp > 1 else 1
    mode = _table(data, "activation_checkpoint").get("mode", "selective")
    divided = shard > 1 or (cp > 1 and replicate == 1)
    never = par.get("fsdp_reshard_after_forward", "default") == "never"
    default = par.get("fsdp_reshard_after_forward", "default") == "default" and pp > 1
    parallelism = Parallelism(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp,
        ep=ep,
        tp=tp,
        vpp=vpp,
        sequence_parallel=True,
        zero=(2 if never or default else 3) if divided else 0,
        micro_batch_size=micro,
        schedule=schedule,  # type: ignore[arg-type]
        recompute=mode if mode in ("none", "selective", "full") else "selective",
    )
    used = {"parallelism", "training", "activation_checkpoint", "optimizer", "model"}
    known = {"adamw": "adamw", "adam": "adam"}
    optimizer = _table(data, "optimizer").get("name", "AdamW")
    return Imported(
        "torchtitan.toml",
        parallelism,
        local * replicate * shard
        if batch == -1
        else _whole("global_batch_size", batch),
        _whole("seq_len", training.get("seq_len", 2048)),
        "fp32" if training.get("mixed_precision_param") == "float32" else "bf16",
        known.get(str(optimizer).lower()),
        tuple(f"[{name}]" for name in data if name not in used),
    )


def _toml(text: str) -> dict[str, Any]:
    try:
        tomllib: Any = import_module("tomllib")
    except ModuleNotFoundError as error:  # Python 3.10
        raise PlannerError(
            "reading TOML needs Python 3.11",
            None,
            "use megatron-args or deepspeed.json",
        ) from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlannerError("the file is not TOML", error) from error


def _table(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name, {})
    if not isinstance(found, dict):
        raise PlannerError(f"{name} is not a table", found)
    return cast("dict[str, Any]", found)


# ---- DeepSpeed -------------------------------------------------------------------


def deepspeed_json(text: str, num_gpus: int) -> Imported:
    """A DeepSpeed config; ``"auto"`` values are the trainer's and can not be read."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlannerError("the file is not JSON", error) from error
    if not isinstance(data, dict):
        raise PlannerError("the file is not a DeepSpeed config", type(data).__name__)
    config = cast("dict[str, Any]", data)
    tp = _whole(
        "autotp_size", _table(config, "tensor_parallel").get("autotp_size") or 1
    )
    cp = _whole("sequence_parallel_size", config.get("sequence_parallel_size", 1))
    data_ranks = _data_ranks(num_gpus, tp=tp, cp=cp)
    batch, micro = _deepspeed_batch(config, data_ranks)
    level: Any = _table(config, "zero_optimization").get("stage", 0)
    if type(level) is not int or not 0 <= level <= 3:
        raise PlannerError("unknown ZeRO stage", level, "use 0 to 3")
    divided = data_ranks * cp > 1 and level > 0
    precision: Precision = "fp32"
    for name in ("bf16", "fp16"):
        if _table(config, name).get("enabled") is True:
            precision = cast("Precision", name)
    kind = str(_table(config, "optimizer").get("type", "AdamW")).lower()
    read_keys = {
        "tensor_parallel", "sequence_parallel_size", "zero_optimization", "bf16",
        "fp16", "optimizer", "train_batch_size", "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    }  # fmt: skip
    optimizers = {"adamw": "adamw", "adam": "adam", "sgd": "sgd", "lion": "lion"}
    return Imported(
        "deepspeed.json",
        Parallelism(
            dp_replicate=1 if divided else data_ranks,
            dp_shard=data_ranks if divided else 1,
            cp=cp,
            tp=tp,
            sequence_parallel=False,
            zero=level if divided else 0,
            micro_batch_size=micro,
        ),
        batch,
        None,
        precision,
        optimizers.get(kind),
        tuple(k for k in config if k not in read_keys),
    )


def _deepspeed_batch(config: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """(global batch, micro-batch): two of the three figures give the third."""
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    for name in names:
        if config.get(name) == "auto":
            raise PlannerError(
                f"{name} is auto", "auto", "write the number in the file"
            )
    total, micro, steps = (
        None if config.get(n) is None else _whole(n, config[n]) for n in names
    )
    if total is not None and micro is None:
        micro = total // (ranks * (steps or 1))
    if total is None:
        total = (micro or 1) * (steps or 1) * ranks
    micro = micro or 1
    steps = steps or total // (micro * ranks)
    if micro < 1 or total != micro * steps * ranks:
        raise PlannerError(
            "the batch figures do not agree",
            f"{total} is not {micro} x {steps} x {ranks} ranks",
            "correct the config or give its cluster",
        )
    return total, micro
