"""What a user may hand in, and the exact size of every preset."""

from __future__ import annotations

# pyright: reportAttributeAccessIssue=false
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.trace import trace
from planner import models_hf, models_vision
from planner.errors import PlannerError
from planner.models import preset_table, resolve_model
from planner.presets import PRESETS

# from the published models: Hugging Face and torchvision where they exist, else the
# papers' formulas
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt-22b": 22_074_273_792,
    "gpt3-175b": 174_615_846_912,
    "gpt-530b": 529_600_819_200,
    "gpt-1t": 1_008_038_758_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
    "bert-large": 335_174_458,
    "t5-11b": 11_307_321_344,
    "vit-l16": 304_326_632,
    "resnet50": 25_557_032,
    "wide-resnet-250m": 254_123_104,
    "wide-resnet-1b": 1_005_653_184,
    "wide-resnet-2b": 1_965_011_008,
    "wide-resnet-4b": 4_000_937_344,
    "wide-resnet-6.8b": 6_727_679_424,
    "wide-resnet-13b": 13_267_137_984,
    "wide-resnet": 13_267_137_984,
    "unet-sd": 859_520_964,
}


def unique(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(x) * mask * scale


# --- presets --------------------------------------------------------------------------


def test_every_preset_has_its_size() -> None:
    assert PARAMETERS.keys() == PRESETS.keys()
    assert {name for name, text in preset_table() if text} == PRESETS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_parameters_are_exact(name: str) -> None:
    source = resolve_model(name)
    model, args, kwargs = source.build()
    assert unique(model) == PARAMETERS[name]
    assert args == ()
    assert "labels" in kwargs
    assert all(t.device.type == "meta" for t in kwargs.values())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(t.shape[0] == source.batch == 1 for t in kwargs.values())


@pytest.mark.parametrize(
    ("name", "layers", "width", "vocab"),
    [
        ("gpt-22b", 48, 6144, 51200),
        ("gpt3-175b", 96, 12288, 51200),
        ("gpt-530b", 105, 20480, 51200),
        ("gpt-1t", 128, 25600, 51200),
    ],
)
def test_gpt_sizes_follow_the_formula(
    name: str, layers: int, width: int, vocab: int
) -> None:
    # per layer 12 h^2 + 13 h; embeddings (V + s) h; the last norm 2 h
    formula = layers * (12 * width**2 + 13 * width) + (vocab + 2048 + 2) * width
    assert PARAMETERS[name] == formula


def test_the_largest_preset_is_built_in_two_seconds() -> None:
    resolve_model("gpt2").build()
    start = time.process_time()
    resolve_model("gpt-1t").build()
    assert time.process_time() - start < 2


def test_deepseek_keeps_its_router_bias_in_fp32() -> None:
    model, _, _ = resolve_model("deepseek-v3").build()
    biases = [b for n, b in model.named_buffers() if n.endswith("router_bias")]
    assert sum(b.numel() for b in biases) == 14_848
    assert {b.dtype for b in biases} == {torch.float32}


@pytest.mark.parametrize(
    "name", ["gpt2", "llama3-8b", "mixtral-8x7b", "bert-large", "vit-l16", "resnet50"]
)
def test_presets_trace_to_a_loss_for_any_batch(name: str) -> None:
    model, args, kwargs = resolve_model(name, seq_len=64).build()
    traced = trace(model, args, kwargs, batch=1)
    assert traced.symbolic
    (loss,) = traced.at_batch(3).graph.output_node().all_input_nodes
    assert loss.meta["val"].shape == ()
    assert loss.meta["val"].requires_grad
    assert traced.parameter_count == PARAMETERS[name]
    assert len(traced.runs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_preset_traces_in_ten_seconds(name: str) -> None:
    model, args, kwargs = resolve_model(name).build()
    start = time.process_time()
    traced = trace(model, args, kwargs, batch=1)
    assert time.process_time() - start < (30 if name == "unet-sd" else 10)
    assert traced.parameter_count == PARAMETERS[name]
    assert traced.symbolic


def test_inference_gives_logits_in_eval_mode() -> None:
    model, args, kwargs = resolve_model("gpt2", mode="infer", seq_len=16).build()
    assert not model.training
    assert set(kwargs) == {"input_ids"}
    traced = trace(model, args, kwargs, training=False)
    (logits,) = traced.graph_module.graph.output_node().all_input_nodes
    assert tuple(logits.meta["val"].shape) == (1, 16, 50257)


def test_sizes_and_dtype_are_options() -> None:
    source = resolve_model("vit-l16", image_size=384, dtype="fp32")
    model, _, kwargs = source.build()
    assert tuple(kwargs["pixels"].shape) == (1, 3, 384, 384)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (source.image_size, source.seq_len) == (384, 0)
    assert resolve_model("llama3-8b", seq_len=100).seq_len == 100


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"layers": 2, "width": 32, "heads": 4, "vocab": 61, "dropout": 0.0}),
        (
            "llama3-8b",
            {
                "layers": 2,
                "width": 32,
                "inner": 48,
                "heads": 4,
                "kv_heads": 2,
                "vocab": 61,
                "head_dim": 8,
            },
        ),
        ("deepseek-v3", {"layers": 4, "dense_layers": 1}),
    ],
)
def test_small_presets_learn_causally(name: str, changes: dict[str, Any]) -> None:
    """Real numbers: the loss is finite, and no logit depends on a later token."""
    from dataclasses import replace

    from planner.presets.deepseek import DEEPSEEK_SIZES, DeepSeek
    from planner.presets.gpt import GPT, GPT_SIZES
    from planner.presets.llama import LLAMA_SIZES, Llama

    torch.manual_seed(0)
    if name == "gpt2":
        model: nn.Module = GPT(replace(GPT_SIZES[name], **changes), 16)
    elif name == "llama3-8b":
        model = Llama(replace(LLAMA_SIZES[name], **changes))
    else:
        small = replace(
            DEEPSEEK_SIZES[name],
            width=32,
            dense_inner=48,
            expert_inner=16,
            heads=4,
            q_rank=16,
            kv_rank=16,
            nope_dim=8,
            rope_dim=8,
            v_dim=8,
            experts=8,
            top_k=2,
            groups=4,
            top_groups=2,
            vocab=61,
            **changes,
        )
        model = DeepSeek(small)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
    ids = torch.randint(0, 61, (2, 12))
    model(ids, ids).backward()
    assert all(p.grad is not None for p in model.parameters())
    later = ids.clone()
    later[:, 7:] = (later[:, 7:] + 1) % 61
    before, after = model.eval()(ids), model(later)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_experts_equal_a_loop_over_tokens() -> None:
    from planner.presets.layers import Experts

    torch.manual_seed(0)
    experts = Experts(4, 16, 8)
    for p in experts.parameters():
        nn.init.normal_(p)
    x, weights = torch.randn(6, 16), torch.rand(6, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    expected = torch.zeros_like(x)
    for t in range(6):
        for k in range(2):
            e = int(chosen[t, k])
            gate, up = (x[t] @ experts.gate_up[e]).chunk(2)
            y = (nn.functional.silu(gate) * up) @ experts.down[e]
            expected[t] += weights[t, k] * y
    torch.testing.assert_close(experts(x, chosen, weights), expected)


# --- the same models of other libraries -----------------------------------------------


def test_presets_equal_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")
    for name, other in (("resnet50", "resnet50"), ("vit-l16", "vit_l_16")):
        with torch.device("meta"):
            assert unique(torchvision.models.get_model(other)) == PARAMETERS[name]


def test_presets_equal_hugging_face() -> None:
    library = pytest.importorskip("transformers")
    configs = {
        "gpt2": library.GPT2Config(architectures=["GPT2LMHeadModel"]),
        "bert-large": library.BertConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            architectures=["BertForMaskedLM"],
        ),
        "t5-11b": library.T5Config(
            d_model=1024,
            d_ff=65536,
            d_kv=128,
            num_heads=128,
            num_layers=24,
            architectures=["T5ForConditionalGeneration"],
        ),
    }
    for name, config in configs.items():
        model, _, kwargs = resolve_model(config, seq_len=32).build()
        assert unique(model) == PARAMETERS[name]
        assert "labels" in kwargs


# --- Hugging Face ---------------------------------------------------------------------


def small_llama() -> Any:
    library = pytest.importorskip("transformers")
    return library.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        architectures=["LlamaForCausalLM"],
    )


@pytest.mark.parametrize("form", ["object", "folder", "file", "hf:"])
def test_a_configuration_in_every_form(form: str, tmp_path: Path) -> None:
    config = small_llama()
    folder = tmp_path / "my-llama"
    config.save_pretrained(folder)
    given = {
        "object": config,
        "folder": str(folder),
        "file": str(folder / "config.json"),
        "hf:": f"hf:{folder}",
    }[form]
    source = resolve_model(given, seq_len=32, dtype="bf16")
    assert source.name == ("LlamaConfig" if form == "object" else "my-llama")
    model, args, kwargs = source.build()
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config._attn_implementation == "sdpa"
    assert config.use_cache, "the user's configuration is not changed"
    traced = trace(model, args, kwargs, batch=2)
    loss = traced.graph_module.graph.output_node().all_input_nodes[0]
    assert loss.meta["val"].shape == ()
    assert len(traced.runs) == 1


def test_a_default_causal_lm_works_and_is_not_changed() -> None:
    config = small_llama()
    library = pytest.importorskip("transformers")
    model = library.LlamaForCausalLM(config).eval()
    source = resolve_model(model, seq_len=16)
    copied, args, kwargs = source.build()
    assert copied.training
    assert "labels" in kwargs
    trace(copied, args, kwargs)
    assert model.config.use_cache
    assert not model.training
    assert next(model.parameters()).device.type == "cpu"
    given = resolve_model(model, example_inputs={"input_ids": torch.zeros(2, 8).long()})
    assert (given.batch, given.seq_len) == (2, 8)
    trace(*given.build())


def test_configuration_errors(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    broken, foreign = tmp_path / "broken.json", tmp_path / "foreign.json"
    broken.write_text("{")
    foreign.write_text(json.dumps({"model_type": "no-such-model"}))
    for given, what in (
        (str(broken), "not a JSON file"),
        (str(foreign), "not a known model_type: 'no-such-model'"),
        (str(tmp_path / "none.json"), "no such file"),
        (f"hf:{tmp_path / 'nowhere'}", "no Hugging Face configuration"),
    ):
        with pytest.raises(PlannerError, match=what) as caught:
            resolve_model(given)
        assert "\n" not in str(caught.value)
    library = pytest.importorskip("transformers")
    with pytest.raises(PlannerError, match="1024 > 512"):
        resolve_model(library.BertConfig(), seq_len=1024)


def test_missing_extras_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PlannerError, match=r"pip install parallel-planner\[hf\]"):
        models_hf.model_class(object())
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(PlannerError, match=r"pip install parallel-planner\[vision\]"):
        models_vision.find("timm", "vit_base_patch16_224", None)


# --- torchvision, timm ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("torchvision:resnet50", 25_557_032),
        ("timm:vit_base_patch16_224", 86_567_656),
    ],
)
def test_vision_libraries(text: str, parameters: int) -> None:
    pytest.importorskip(text.partition(":")[0])
    source = resolve_model(text)
    model, args, _ = source.build()
    assert unique(model) == parameters
    assert tuple(args[0].shape) == (1, 3, 224, 224)
    assert source.image_size == 224
    name, _, _ = text.partition(":")
    with pytest.raises(PlannerError, match="Nearest: "):
        resolve_model(f"{name}:{'resnet5' if name == 'torchvision' else 'vit_base'}")


# --- modules and factories ------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.zeros(3, 4), torch.ones(3, 1)),
        {"x": torch.zeros(3, 4), "mask": torch.ones(3, 1)},
        ((torch.zeros(3, 4),), {"mask": torch.ones(3, 1)}),
    ],
)
def test_example_inputs_in_every_form(inputs: Any) -> None:
    model = Simple().eval()
    source = resolve_model(model, example_inputs=inputs, dtype="bf16")
    assert source.batch == 3
    built, args, kwargs = source.build()
    assert built is not model
    assert {p.device.type for p in built.parameters()} == {"meta"}
    assert built.training
    traced = trace(built, args, kwargs)
    assert {t.dtype for t in traced.tensors} == {"bfloat16"}
    assert model.linear.weight.dtype == torch.float32


def test_missing_arguments_are_named() -> None:
    with pytest.raises(PlannerError, match="did not get: x, mask"):
        resolve_model(Simple())
    with pytest.raises(PlannerError, match="did not get: mask"):
        resolve_model(Simple(), example_inputs=torch.zeros(3, 4))
    with pytest.raises(PlannerError, match="It takes: x, mask, scale"):
        resolve_model(Simple(), example_inputs={"y": torch.zeros(3, 4)})


FACTORIES = """
import torch
from torch import nn

def pair():
    return nn.Linear(4, 2), (torch.zeros(5, 4),)

def triple():
    return nn.Linear(4, 2), (), {"input": torch.zeros(5, 4)}

def reads():
    float(torch.ones(1).sum())  # does not work on the meta device
    return pair()

def wrong():
    return 3

def fails():
    raise ValueError("no such size")
"""


@pytest.mark.parametrize("name", ["pair", "triple", "reads"])
@pytest.mark.parametrize("form", ["module", "file", "callable"])
def test_factories(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_factories", raising=False)
    given: Any = f"my_factories:{name}"
    if form == "file":
        given = f"{tmp_path / 'my_factories.py'}:{name}"
    elif form == "callable":
        import importlib

        given = getattr(importlib.import_module("my_factories"), name)
    source = resolve_model(given)
    assert source.batch == 5
    model, args, kwargs = source.build()
    assert unique(model) == 10
    assert trace(model, args, kwargs).parameter_count == 10


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("wrong", "returned int"),
        ("fails", "ValueError: no such size"),
        ("pear", "Found there: pair"),
    ],
)
def test_factory_errors(name: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "factories.py"
    file.write_text(FACTORIES)
    with pytest.raises(PlannerError, match=what):
        resolve_model(f"{file}:{name}")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("gpt3-17b", "unknown model: gpt3-17b. Nearest presets: gpt3-175b"),
        ("no_such_module:build", "can not import the factory"),
        ("nowhere.py:build", "no file nowhere.py"),
        (3, "not a model: int"),
    ],
)
def test_unknown_models(given: Any, what: str) -> None:
    with pytest.raises(PlannerError) as caught:
        resolve_model(given)
    assert what in str(caught.value)


def test_options_are_checked() -> None:
    for options, what in (
        ({"dtype": "fp7"}, "unknown dtype: fp7"),
        ({"seq_len": 0}, "seq_len must be at least 1: 0"),
        ({"mode": "training"}, "unknown mode: training"),
    ):
        with pytest.raises(PlannerError, match=what):
            resolve_model("gpt2", **options)  # type: ignore[arg-type]
