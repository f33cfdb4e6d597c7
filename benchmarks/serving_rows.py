"""Rows of ``inference.csv`` as cases: model, layout, engine, what was measured.

Dimensions are the models' published configurations. A row that says too little to be
priced raises :class:`SkipRowError` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.rows import SkipRowError
from planner.serving.dims import Dims, Experts, Latent, Recurrent

Row = Mapping[str, str]
MLA = Latent(1536, 512, 128, 64, 128)
DEEPSEEK = Dims(
    "deepseek-v3", 61, 7168, 128, 128, 128, 18432, 129280,
    experts=Experts(256, 8, 2048, 2048, 3), latent=MLA,
)  # fmt: skip
LLAMA8 = Dims("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256)


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> Dims:
    return Dims(
        name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab, False,
        True, positions=1024, biased=True,
    )  # fmt: skip


MODELS: Mapping[str, Dims] = {
    "minimaxai/minimax-m2.5": Dims(
        "minimax-m2.5", 62, 3072, 48, 8, 128, 1536, 200064,
        experts=Experts(256, 8, 1536),
    ),
    "qwen/qwen3-235b-a22b": Dims(
        "qwen3-235b-a22b", 94, 4096, 64, 4, 128, 12288, 151936,
        experts=Experts(128, 8, 1536),
    ),
    "qwen/qwen3-32b": Dims("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
    "qwen/qwen3-30b-a3b": Dims(
        "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936,
        experts=Experts(128, 8, 768),
    ),
    "qwen/qwen3.5-397b-a17b": Dims(
        "qwen3.5-397b", 60, 4096, 32, 2, 256, 1024, 248320,
        experts=Experts(512, 10, 1024, 1024),
        recurrent=Recurrent(4, 16, 64, 128, 128),
    ),
    "deepseek-ai/deepseek-r1": DEEPSEEK,
    "deepseek-ai/deepseek-v3": DEEPSEEK,
    "deepseek-ai/deepseek-v3.1": DEEPSEEK,
    "nvidia/deepseek-r1": DEEPSEEK,
    "nvidia/deepseek-v3.1": DEEPSEEK,
    "moonshotai/kimi-k2.5": Dims(
        "kimi-k2", 61, 7168, 64, 64, 128, 18432, 163840,
        experts=Experts(384, 8, 2048, 2048, 1), latent=MLA,
    ),
    "zhipuai/glm-5": Dims(
        "glm-5", 78, 6144, 64, 64, 256, 12288, 154880,
        experts=Experts(256, 8, 2048, 2048, 3),
        latent=Latent(2048, 512, 192, 64, 256),
    ),
    "meta-llama/llama-3.1-8b-instruct": LLAMA8,
    "nvidia/llama-3.1-8b-instruct": LLAMA8,
    "llama3.1-8b": LLAMA8,
    "llama3-8b": LLAMA8,
    "meta-llama/llama-3.1-70b-instruct": Dims(
        "llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256
    ),
    "meta-llama/llama-3.3-70b-instruct": Dims(
        "llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256
    ),
    "llama3.2-1b": Dims("llama3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "llama-7b": Dims("llama-7b", 32, 4096, 32, 32, 128, 11008, 32000),
    "llama2-7b": Dims("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
    "llama2-13b": Dims("llama2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
    "llama2-70b": Dims("llama2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
    "llama-70b": Dims("llama2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
    "mistral-7b": Dims("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000),
    "mixtral-8x7b": Dims(
        "mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000,
        experts=Experts(8, 2, 14336),
    ),
    "internlm-20b": Dims("internlm-20b", 60, 5120, 40, 40, 128, 13824, 103168),
    "falcon-180b": Dims("falcon-180b", 80, 14848, 232, 8, 64, 59392, 65024, False),
    "gpt-j-6b": Dims("gpt-j-6b", 28, 4096, 16, 16, 256, 16384, 50400, False),
    "gpt-350m": _gpt("gpt-350m", 24, 1024, 16),
    "gpt-1.3b": _gpt("gpt-1.3b", 24, 2048, 16),
    "gpt-20b": _gpt("gpt-20b", 44, 6144, 64),
    "gpt-530b": _gpt("gpt-530b", 105, 20480, 128),
    "gpt3-5b": _gpt("gpt3-5b", 24, 4096, 32),
    "gpt3-20b": _gpt("gpt3-20b", 44, 6144, 48),
    "gpt3-175b": _gpt("gpt3-175b", 96, 12288, 96),
}  # fmt: skip

#: Start of the framework column to the engine.
ENGINES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "trtllm",
    "tensorrt-llm": "trtllm-static",
    "fastertransformer": "fastertransformer",
    "lmdeploy": "lmdeploy",
    "gpt-fast": "gptfast",
    "litgpt": "eager",
    "hf eager": "eager",
}
#: precision column to (weights, group, 8-bit arithmetic)
FORMATS = {
    "bf16": ("bf16", 128, True),
    "fp16": ("fp16", 128, True),
    "": ("bf16", 128, True),
    "fp8": ("fp8", 128, True),
    "fp4": ("fp4", 128, True),
    "int4": ("int4", 32, True),
    "int8-wo": ("int8", 128, False),
    "int8": ("int8", 128, True),
    "int4-wo (g32)": ("int4", 32, False),
    "nf4": ("int4", 64, False),
}
#: GPUs of one fast domain, where the GPU's name does not say.
NODES = {"GB200": 72, "GB300": 72}


@dataclass(frozen=True, slots=True)
class Case:
    """One measured configuration; times in seconds, None where not measured."""

    name: str
    dims: Dims
    cluster: str
    tp: int
    pp: int
    ep: int
    attention_dp: int
    engine: str
    weights: str
    group: int
    eight_bit_math: bool
    mode: str
    batch: int
    isl: int
    osl: int
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    latency_s: float | None
    quality: str
    key: tuple[str, str]  # model and GPU

    @property
    def family(self) -> str:
        """The engine without its release."""
        return self.engine.partition("@")[0]


def _number(row: Row, name: str) -> float | None:
    text = row.get(name) or ""
    return float(text) if text else None


def _whole(row: Row, name: str, default: int) -> int:
    value = _number(row, name)
    return int(value) if value else default


def _model(row: Row) -> Dims:
    name = row["model"].lower()
    for suffix in ("-fp8", "-nvfp4", "-fp4", "-awq", "-instruct-fp8"):
        name = name.removesuffix(suffix)
    if name not in MODELS:
        raise SkipRowError(f"no published dimensions kept for {row['model']}")
    return MODELS[name]


def case_of(row: Row) -> Case:
    """The case of one row; SkipRowError says why it can not be priced."""
    mode = row["mode"]
    if mode in ("encode",):
        raise SkipRowError("an encoder: no decoding")
    dims = _model(row)
    framework = row["framework"].lower()
    engine = next(
        (e for start, e in ENGINES.items() if framework.startswith(start)), ""
    )
    if not engine:
        raise SkipRowError(f"no profile of {row['framework']}")
    if row["precision"].lower() not in FORMATS:
        raise SkipRowError(f"no price for precision {row['precision']}")
    if mode.startswith("serving"):
        # releases differ; a row that names none is of the framework's main entry
        engine += "@" + (framework.partition(" ")[2].strip() or "unstated")
    weights, group, math8 = FORMATS[row["precision"].lower()]
    tp, pp = _whole(row, "tp", 0), _whole(row, "pp", 1)
    ep, dp = _whole(row, "ep", 1), _whole(row, "dp_attn", 1)
    if not tp:
        raise SkipRowError("no tensor-parallel degree in the row")
    world = tp * dp
    if dp > 1 and (world > 72 or (ep > 1 and world % ep)):
        raise SkipRowError("attention data parallelism with an ambiguous rank layout")
    if ep > world or world % ep:
        raise SkipRowError("more expert ranks than GPUs")
    gpu = row["gpu"]
    nodes = NODES.get(gpu, 8)
    gpus = world * pp
    cluster = f"{gpus}x{gpu}"
    if gpus > nodes and gpus % nodes:
        raise SkipRowError("the GPUs do not fill whole nodes")
    served = _whole(row, "concurrency", 0) if mode.startswith("serving") else 0
    batch = served or _whole(row, "batch", 1)

    def ms(name: str) -> float | None:
        value = _number(row, name)
        return value / 1e3 if value else None

    return Case(
        row["id"], dims, cluster, world, pp, ep, dp, engine, weights, group, math8,
        mode.split(" ")[0], batch, _whole(row, "isl", 128), _whole(row, "osl", 200),
        ms("ttft_ms"), ms("tpot_ms"), _number(row, "output_tokens_per_s"),
        ms("latency_ms"), row["quality"], (row["model"], gpu),
    )  # fmt: skip
