"""nn.Module -> aten graph: exact counts, any batch, few layers, clear errors."""

from __future__ import annotations

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportCallIssue=false
import copy
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from passes.errors import PassError
from passes.ir import TensorKind
from passes.trace import LayerRun, TracedModel, trace
from tests.cases import builders

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, width: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = scale

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y = self.down(F.relu(self.up(self.norm(x)))) * self.scale
        return x + y + shift


class Stack(nn.Module):
    """``layers`` equal layers between an embedding and a tied head."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.shift = nn.Parameter(torch.zeros(8))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.shift)
        return self.head(x)


def ids(batch: int = 1, length: int = 4) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def targets(module: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def outputs(module: fx.GraphModule) -> list[tuple[int, ...]]:
    nodes = module.graph.output_node().all_input_nodes
    return [tuple(n.meta["val"].shape) for n in nodes]


class Runner(fx.Interpreter):
    """Runs a traced graph on the CPU, regions without gradients included."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        with torch.set_grad_enabled(not n.meta.get("no_grad", False)):
            return super().run_node(n)


def with_weights(traced: TracedModel, model: nn.Module) -> Any:
    """Call the traced graph with the model's own tensors in it."""
    module = copy.deepcopy(traced.graph_module)
    for node in module.graph.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        owner, source = module.get_submodule(path), model.get_submodule(path)
        for store in ("_parameters", "_buffers"):
            if name in getattr(source, store):
                getattr(owner, store)[name] = getattr(source, store)[name]
    return Runner(module).run


# --- the graph ------------------------------------------------------------------------


def test_the_graph_runs_and_equals_the_model() -> None:
    model = Stack(3)
    traced = trace(model, (ids(2),))
    given = torch.randint(0, 11, (2, 4))
    (got,) = with_weights(traced, model)(given)
    torch.testing.assert_close(got, model(given))


def test_every_node_carries_value_and_module() -> None:
    traced = trace(Stack(2), (ids(3),))
    for node in traced.graph_module.graph.nodes:
        if node.op == "output":
            continue
        assert isinstance(node.meta["val"], torch.Tensor)
        assert all(type(s) is int for s in node.meta["val"].shape)
    found = {
        n.meta["module_path"]: n.meta["module_class"]
        for n in traced.graph_module.graph.nodes
        if n.op == "call_function"
    }
    assert found["layers.1.up"].endswith("Linear")
    assert "stack_trace" in traced.graph_module.graph.output_node().args[0][0].meta


def test_gradients_flow_where_autograd_says() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                quiet = self.linear(x).relu()
            return self.linear(self.frozen(x)).sigmoid() + quiet.detach()

    traced = trace(Model(), (torch.zeros(2, 4),))
    flags = {
        str(n.target): n.meta["val"].requires_grad
        for n in traced.graph_module.graph.nodes
        if n.op == "call_function"
    }
    assert flags["aten.sigmoid.default"]
    assert not flags["aten.relu.default"]
    linear = torch.ops.aten.linear.default
    linears = traced.graph_module.graph.find_nodes(op="call_function", target=linear)
    quiet = [n.meta["no_grad"] for n in linears]
    assert quiet == [True, False, False]
    assert [n.meta["val"].requires_grad for n in linears] == [False, False, True]
    silent = trace(Model(), (torch.zeros(2, 4),), training=False)
    assert not any(
        n.meta["val"].requires_grad
        for n in silent.graph_module.graph.nodes
        if n.op == "call_function"
    )


def test_no_guards_or_asserts_are_left() -> None:
    traced = trace(Stack(2).to(torch.bfloat16), (ids(2),))
    names = targets(traced.graph_module)
    assert not any("assert" in n or "guards" in n for n in names)
    assert all(n.op != "call_module" for n in traced.graph_module.graph.nodes)


def test_the_model_is_not_changed() -> None:
    model = Stack(6)
    before = {n: (id(p), p.device) for n, p in model.named_parameters()}
    state = [dict(vars(m)) for m in model.modules()]
    trace(model, (ids(),), batch=4)
    assert {n: (id(p), p.device) for n, p in model.named_parameters()} == before
    assert [dict(vars(m)) for m in model.modules()] == state
    assert len(model.layers) == 6


def test_dtype_casts_the_graph_and_the_counts() -> None:
    traced = trace(nn.Linear(4, 4), (torch.zeros(1, 4),), dtype=torch.bfloat16)
    assert (
        traced.graph_module.graph.output_node().all_input_nodes[0].meta["val"].dtype
        == torch.bfloat16
    )
    assert {t.dtype for t in traced.tensors} == {"bfloat16"}


# --- the batch ------------------------------------------------------------------------


def test_a_symbolic_batch_gives_every_micro_batch_from_one_trace() -> None:
    traced = trace(Stack(2), (ids(1),), batch=4)
    assert traced.symbolic
    assert traced.batched_inputs == traced.inputs
    assert outputs(traced.graph_module) == [(4, 4, 11)]
    for batch in (1, 3, 64):
        again = traced.at_batch(batch)
        assert outputs(again) == [(batch, 4, 11)]
        assert targets(again) == targets(traced.graph_module)
    assert traced.with_batch(3).batch == 3


def test_a_batch_in_the_model_is_traced_again() -> None:
    class Baked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            parts = [self.linear(x[i]) for i in range(int(x.shape[0]))]
            return torch.stack(parts)

    traced = trace(Baked(), (torch.zeros(2, 4),))
    assert not traced.symbolic
    for batch in (1, 2, 5):
        names = targets(traced.at_batch(batch))
        assert Counter(names)["aten.linear.default"] == batch
        assert outputs(traced.at_batch(batch)) == [(batch, 4)]


def test_a_branch_on_the_batch_is_traced_again_where_it_turns() -> None:
    class Turns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() if x.shape[0] < 8 else x.sigmoid()

    traced = trace(Turns(), (torch.zeros(2, 4),))
    assert traced.symbolic
    assert targets(traced.at_batch(7)) == ["aten.relu.default"]
    assert targets(traced.at_batch(8)) == ["aten.sigmoid.default"]
    assert outputs(traced.at_batch(8)) == [(8, 4)]


def test_a_batch_below_one_is_refused() -> None:
    with pytest.raises(PassError, match="at least 1: 0"):
        trace(nn.Linear(4, 4), (torch.zeros(2, 4),), batch=0)


# --- parameters -----------------------------------------------------------------------


def test_tied_frozen_and_buffers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.c = nn.Linear(4, 4, bias=False)
            self.c.weight = nn.Parameter(self.a.weight.detach())  # by storage
            self.frozen = nn.Linear(4, 2).requires_grad_(False)
            self.register_buffer("kept", torch.zeros(3))
            self.register_buffer("lost", torch.zeros(5), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.c(self.b(self.a(x)))) + self.kept[0] + self.lost[0]

    traced = trace(Model(), (torch.zeros(2, 4),))
    by_name = {t.name: t for t in traced.tensors}
    assert by_name["a.weight"].aliases == ("b.weight", "c.weight")
    assert traced.parameter_count == 16 + 10
    assert traced.trainable_count == 16
    assert traced.buffer_bytes == 8 * 4
    assert by_name["kept"].persistent
    assert not by_name["lost"].persistent
    read = [str(n.target) for n in traced.graph_module.graph.find_nodes(op="get_attr")]
    assert Counter(read)["a.weight"] == 1
    assert "b.weight" not in read


def test_a4_a_frozen_backbone() -> None:
    traced = trace(*builders.detection_transformer())
    assert traced.parameter_count == 41_501_895
    assert traced.trainable_count == 18_046_983
    assert traced.buffer_bytes == 424_960
    calls = Counter(targets(traced.graph_module))
    left_out = sum(len(r.original) - len(r.kept) for r in traced.runs)
    assert left_out == 3 + 4 + 4  # bottlenecks, encoder and decoder layers
    assert calls["aten.conv2d.default"] == 54 - 3 * 3


def test_a10_complex_tables_are_counted() -> None:
    traced = trace(*builders.complex_rotary())
    assert traced.parameter_count == 67_108_864
    assert traced.buffer_bytes == 4_194_304
    buffers = [t for t in traced.tensors if t.kind is TensorKind.BUFFER]
    assert {b.dtype for b in buffers} == {"complex64"}
    assert not any(b.persistent for b in buffers)


def test_a11_mutations_are_kept_and_named() -> None:
    model, args, kwargs = builders.averaged()
    traced = trace(model, args, kwargs)
    assert traced.mutated == ("0.scale", "0.mean", "1.scale", "1.mean")
    small, _, _ = builders.averaged(width=4, device="cpu")
    x = torch.randn(2, 3, 4)
    expected = copy.deepcopy(small)
    want = expected(x)
    again = trace(small, (x,))
    (got,) = with_weights(again, small)(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(small[0].mean, expected[0].mean)


def test_batch_norm_statistics_are_mutated() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    traced = trace(model, (torch.zeros(2, 3, 8, 8),))
    assert set(traced.mutated) == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert trace(model.eval(), (torch.zeros(2, 3, 8, 8),)).mutated == ()


# --- depth ----------------------------------------------------------------------------


def test_two_of_many_equal_layers_are_traced() -> None:
    model = Stack(30)
    traced = trace(model, (ids(),))
    (run,) = traced.runs
    assert run == LayerRun("layers", tuple(map(str, range(30))), ("0", "1"))
    assert run.units == 30
    assert any("traced 2 of 30 layers of layers" in w for w in traced.warnings)
    assert traced.parameter_count == sum(p.numel() for p in model.parameters())
    # what is left is the graph of the two-layer model
    short = trace(Stack(2), (ids(),))
    assert targets(traced.graph_module) == targets(short.graph_module)
    full = trace(model, (ids(),), shorten_runs=False)
    assert full.runs == ()
    per_layer = len(targets(traced.graph_module)) - len(targets(full.graph_module))
    assert per_layer % 28 == 0


def test_the_shortened_graph_is_the_two_layer_model() -> None:
    model, short = Stack(8), Stack(2)
    short.load_state_dict(model.state_dict(), strict=False)
    traced = trace(model, (ids(),))
    given = torch.randint(0, 11, (1, 4))
    (got,) = with_weights(traced, model)(given)
    torch.testing.assert_close(got, short(given))


def test_alternating_layers_make_units_of_two() -> None:
    class Alternating(Stack):
        def __init__(self) -> None:
            super().__init__(0)
            self.layers = nn.ModuleList(Layer(scale=1.0 + i % 2) for i in range(10))

    traced = trace(Alternating(), (ids(),))
    (run,) = traced.runs
    assert (run.period, run.kept, run.units) == (2, ("0", "1", "2", "3"), 5)


@pytest.mark.parametrize("change", ["shape", "setting", "few", "shared", "frozen"])
def test_unequal_layers_are_traced_one_by_one(change: str) -> None:
    model = Stack(3 if change == "few" else 4)
    if change == "shape":
        model.layers[2] = Layer(8)
        model.layers[2].up, model.layers[2].down = nn.Linear(8, 4), nn.Linear(4, 8)
    elif change == "setting":
        model.layers[2].scale = 2.0
    elif change == "shared":
        model.layers[3] = model.layers[0]
    elif change == "frozen":
        model.layers[1].requires_grad_(False)
    traced = trace(model, (ids(),))
    assert traced.runs == ()
    layers = 3 if change == "few" else 4
    assert Counter(targets(traced.graph_module))["aten.linear.default"] == (
        2 * layers + 1
    )


class Collects(Stack):
    """Reads the state after layer 3 as well."""

    def forward(self, ids: Tensor) -> Tensor:
        x, middle = self.embed(ids), None
        for i, layer in enumerate(self.layers):
            x = layer(x, self.shift)
            middle = x if i == 3 else middle
        assert middle is not None
        return self.head(x + middle)


class Branches(Stack):
    """Layers of equal settings that are used differently by index."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, self.shift * 2 if i == 4 else self.shift)
        return self.head(x)


class Skips(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers[:-1]:
            x = layer(x, self.shift)
        return self.head(x)


class Backwards(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in reversed(range(6)):
            x = self.layers[i](x, self.shift)
        return self.head(x)


@pytest.mark.parametrize("kind", [Collects, Branches, Skips, Backwards])
def test_layers_used_in_other_ways_fall_back_to_a_full_trace(kind: Any) -> None:
    model = kind(6)
    traced = trace(model, (ids(),))
    assert traced.runs == ()
    assert any("traced every layer" in w for w in traced.warnings)
    given = torch.randint(0, 11, (1, 4))
    (got,) = with_weights(traced, model)(given)
    torch.testing.assert_close(got, model(given))


def test_layers_called_by_number_are_shortened_too() -> None:
    class Numbered(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for i in range(6):
                x = self.layers[i](x, self.shift)
            return self.head(x)

    assert len(trace(Numbered(6), (ids(),)).runs) == 1


# --- errors ---------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            return y * 2
        return y


class Selects(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[(x > 0).nonzero()[:, 0]]


class Opaque(Branch):
    def forward(self, x: Tensor) -> Any:
        return type("Cache", (), {"value": self.linear(x)})()


@pytest.mark.parametrize(
    ("model", "what", "line"),
    [
        (Branch(), "data-dependent control flow", "if y.sum() > 0"),
        (Selects(), "a size depends on data: aten.nonzero", "nonzero()[:, 0]"),
        (Opaque(), "of a type that can not be traced", "Opaque"),
    ],
)
def test_an_error_names_the_line_and_what_to_do(
    model: nn.Module, what: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PassError) as caught:
        trace(model, (torch.zeros(2, 4),))
    assert what in caught.value.what
    assert line in str(caught.value.value)
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_missing_arguments_are_named() -> None:
    with pytest.raises(PassError, match="shift"):
        trace(Layer(), (torch.zeros(2, 8),))
    with pytest.raises(PassError, match="no example input"):
        trace(nn.Linear(4, 4), (3.0,))


# --- whole models ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("distilbert", 66_985_530),
        ("mixtral_8x7b", 46_702_792_704),
    ],
)
def test_hugging_face_models(name: str, parameters: int) -> None:
    from tests.cases import models

    traced = trace(getattr(models, name)(), (), {"input_ids": models.ids(1, 64)})
    assert traced.parameter_count == parameters
    assert traced.symbolic
    assert len(traced.runs) == 1


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        ((152064, 3584, 18944, 28, 28, 4, False), 7_615_616_512),  # B1
        ((151936, 1536, 8960, 28, 12, 2, True), 1_543_714_304),  # C4
    ],
)
def test_b1_c4_grouped_query_models(sizes: tuple[Any, ...], parameters: int) -> None:
    from tests.cases import models

    vocab, width, inner, layers, heads, kv_heads, tied = sizes
    model = models.qwen2(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )
    traced = trace(model, (), {"input_ids": models.ids(1, 64)})
    assert traced.parameter_count == parameters
    aliases = [t.aliases for t in traced.tensors if t.aliases]
    assert aliases == ([("lm_head.weight",)] if tied else [])


def test_b4_c1_odd_vocabulary_and_thirty_layers() -> None:
    from tests.cases import models

    odd = models.llama(
        vocab_size=32001,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
    )
    inputs = {"input_ids": models.ids(1, 64)}
    assert trace(odd, (), inputs).parameter_count == 13_015_874_560
    deep = models.gpt2(vocab_size=50257, n_embd=1536, n_layer=30, n_head=16)
    traced = trace(deep, (), inputs)
    assert traced.parameter_count == 928_716_288
    assert len(traced.runs[0].original) == 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama3-405b", "deepseek-v3"])
def test_hugging_face_giants_trace_in_ten_seconds(kind: str) -> None:
    from tests.cases import models

    library = models.transformers
    if kind == "deepseek-v3":
        with torch.device("meta"):
            config = library.DeepseekV3Config(use_cache=False)
            model = library.DeepseekV3ForCausalLM(config)
    else:
        model = models.llama(
            vocab_size=128256,
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
        )
    start = time.process_time()
    traced = trace(model, (), {"input_ids": models.ids(1, 256)})
    assert time.process_time() - start < 10
    expected = {"llama3-405b": 405_853_388_800, "deepseek-v3": 671_026_404_352}
    assert traced.parameter_count == expected[kind]


@pytest.mark.slow
def test_f9_a_hybrid_model_in_its_budget() -> None:
    from tests.cases import models

    library = models.transformers
    config = library.Qwen3_5MoeTextConfig(num_hidden_layers=24)
    config.use_cache = False
    with torch.device("meta"):
        model = library.Qwen3_5MoeForCausalLM(config)
    start = time.process_time()
    traced = trace(model, (), {"input_ids": models.ids(1, 256)})
    assert time.process_time() - start < 120
    (run,) = traced.runs
    assert (run.period, run.units) == (4, 6)  # three linear layers and a full one
