"""Cache bytes, weights and heads of real configurations, exact."""

import pytest

from planner.errors import PlannerError
from planner.serving.dims import serving_model
from planner.serving.kv_cache import (
    Formats,
    Shard,
    cut,
    illegal_tp,
    kv_bytes_per_token,
    sequence_bytes,
    shard_sequence_bytes,
    shard_weight_bytes,
    weight_bytes,
)
from tests.unit.planner.serving.zoo import DIMS

#: bf16 bytes of one more token (layers x heads x (K + V) x 2), and of a sequence of
#: 8192 tokens, computed by hand from each model's published configuration.
CACHE = {
    "gpt2": (12 * 12 * 128 * 2, 8192 * 36_864),
    "gpt3-175b": (4_718_592, 8192 * 4_718_592),
    "llama2-7b": (524_288, 2**32),
    "llama2-13b": (819_200, 8192 * 819_200),
    "llama2-70b": (327_680, 8192 * 327_680),
    "llama3-8b": (131_072, 2**30),
    "llama3-70b": (327_680, 8192 * 327_680),
    "llama3-405b": (516_096, 8192 * 516_096),
    "mistral-7b": (131_072, 4096 * 131_072),
    "qwen3-32b": (262_144, 8192 * 262_144),
    "gemma3-27b": (507_904, 10 * 8192 * 8192 + 52 * 8192 * 1024),
    "gpt-oss-120b": (73_728, 18 * 2048 * 8192 + 18 * 2048 * 128),
    "falcon-7b": (8_192, 8192 * 8_192),
    "falcon-180b": (163_840, 8192 * 163_840),
    "mixtral-8x7b": (131_072, 2**30),
    "qwen3-30b-a3b": (98_304, 8192 * 98_304),
    "qwen3-235b-a22b": (192_512, 8192 * 192_512),
    "deepseek-v3": (70_272, 8192 * 70_272),
    "kimi-k2": (70_272, 8192 * 70_272),
    "qwen3-next-80b": (
        24_576,
        8192 * 24_576 + 36 * (32 * 128 * 128 + (2 * 2048 + 4096) * 4) * 2,
    ),
}


@pytest.mark.parametrize("name", sorted(DIMS))
def test_cache_of_twenty_configurations(name: str) -> None:
    model = serving_model(DIMS[name])
    per_token, sequence = CACHE[name]
    assert kv_bytes_per_token(model) == per_token
    assert sequence_bytes(model, 8192) == sequence
    assert kv_bytes_per_token(model, "fp8") == per_token / 2


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("gpt2", 124_439_808),
        ("qwen3-32b", 32_762_123_264),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_parameters(name: str, parameters: int) -> None:
    assert serving_model(DIMS[name]).parameters == parameters


def test_window_accounting_of_a_27b_model() -> None:
    """vllm-project/vllm#16199: naive 2,080,374,784 B at 4,096 tokens."""
    model = serving_model(DIMS["gemma3-27b"])
    assert sequence_bytes(model, 4096, windowed=False) == 2_080_374_784
    assert sequence_bytes(model, 4096) == 771_751_936
    # 25.6e9 x 0.5195 B and a 16-bit table
    assert weight_bytes(model, Formats("int4")) == pytest.approx(16.12e9, rel=1e-3)


def test_latent_cache_is_whole_on_every_rank() -> None:
    """LMCache#694: 576 elements a layer, once; 131,072 tokens are 8.58 GiB a rank."""
    model = serving_model(DIMS["deepseek-v3"])
    shard = Shard(model.layers, tp=8)
    assert shard_sequence_bytes(shard, 131_072, "bf16") == 131_072 * 70_272
    assert pytest.approx(8.58, abs=5e-3) == 131_072 * 70_272 / 2**30
    spread = Shard(model.layers, tp=8, attention_dp=8)
    assert shard_sequence_bytes(spread, 131_072, "bf16") == 131_072 * 70_272


def test_heads_are_divided_and_repeated_over_ranks() -> None:
    model = serving_model(DIMS["qwen3-30b-a3b"])  # 4 KV heads
    for tp, heads in ((1, 4), (2, 2), (4, 1), (8, 1)):
        shard = Shard(model.layers, tp=tp)
        assert shard_sequence_bytes(shard, 1000, "bf16") == 48 * heads * 256 * 2 * 1000
    whole = shard_weight_bytes(model, Shard(model.layers, tp=4), Formats())
    more = shard_weight_bytes(model, Shard(model.layers, tp=8), Formats())
    repeated = 48 * 2048 * 256 * 0.5 * 2  # half of one head's K and V a layer
    norms = 48 * (2 * 2048 + 256) * 2 + 2048 * 2
    routers = 48 * 128 * 2048 * 2
    assert more - repeated - norms - routers == pytest.approx(
        (whole - norms - routers) / 2
    )


def test_four_bit_70b_over_eight_cards() -> None:
    """vllm-project/vllm#2856: 36.6 GB, 4.26 GiB a GPU, 40,960 B of cache a token."""
    model, formats = serving_model(DIMS["llama2-70b"]), Formats("int4", group=128)
    assert weight_bytes(model, formats) == pytest.approx(36.6e9, rel=2e-3)
    shard = Shard(model.layers, tp=8)
    held = shard_weight_bytes(model, shard, formats)
    assert held / 2**30 == pytest.approx(4.26, abs=0.01)
    assert shard_sequence_bytes(shard, 1, "bf16") == 40_960
    assert illegal_tp(model, 8, formats) == ""
    assert "groups of 1024" in illegal_tp(model, 8, Formats("int4", group=1024))


@pytest.mark.parametrize(("tp", "legal"), [(1, 1), (2, 1), (4, 1), (6, 0), (8, 1)])
def test_legal_degrees_of_70b(tp: int, legal: int) -> None:
    reason = illegal_tp(serving_model(DIMS["llama3-70b"]), tp, Formats())
    assert (reason == "") == bool(legal), reason


def test_stages_hold_all_layers_once() -> None:
    model = serving_model(DIMS["gemma3-27b"])
    for pp in (1, 2, 3, 7):
        stages = cut(model, pp)
        assert len(stages) == pp
        assert sum(n for s in stages for _, n in s) == 62
        held = [
            shard_weight_bytes(
                model, Shard(s, 1, first=k == 0, last=k == pp - 1), Formats()
            )
            for k, s in enumerate(stages)
        ]
        again = 0 if pp == 1 else model.vocab * model.hidden * 2  # the tied head
        assert sum(held) == weight_bytes(model, Formats()) + again


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(PlannerError, match="weight format"):
        Formats("int3")
    with pytest.raises(PlannerError, match="cache format"):
        Formats("bf16", "int3")
