"""A shortened zoo: real models traced, counted, planned and checked."""

from __future__ import annotations

import json

import pytest

from benchmarks.zoo import (
    cause_of,
    examine,
    main,
    names_of,
    record_results,
    spread,
    summary,
)

FAST = (
    "torchvision:resnet18",
    "torchvision:mobilenet_v3_small",
    "timm:convnext_atto",
    "timm:vit_tiny_patch16_224",
    "hf:bert",
    "hf:mistral",
)
SLOW = (
    "torchvision:fcn_resnet50",
    "torchvision:swin_t",
    "torchvision:densenet121",
    "torchvision:r3d_18",
    "timm:resmlp_12_224",
    "timm:efficientnet_b0",
    "timm:mixer_s16_224",
    "hf:gpt2",
    "hf:t5",
    "hf:mixtral",
)


def _extra(name: str) -> None:
    library = "transformers" if name.startswith("hf:") else name.partition(":")[0]
    pytest.importorskip(library)


def _check(name: str, gpus: tuple[int, ...]) -> None:
    _extra(name)
    record = examine(name, gpus)
    assert record.cause == ""
    assert record.traced
    assert record.planned
    assert record.checked
    assert record.parameters_equal
    unread = name.startswith("hf:") and record.flops[1] == 0
    assert record.flops_equal or unread  # some read values as they build their masks
    assert record.unknown == []


@pytest.mark.parametrize("name", FAST)
def test_model_is_planned(name: str) -> None:
    _check(name, (8,))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_models_are_planned(name: str) -> None:
    _check(name, (8, 64))


def test_a_model_that_fails_is_recorded(tmp_path, capsys) -> None:
    """An unknown name is a failure with advice, grouped by its cause."""
    path = tmp_path / "zoo.json"
    arguments = ["--family", "timm", "--models", "nosuchmodel", "--record", str(path)]
    pytest.importorskip("timm")
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["traced_fraction"] == document["planned_fraction"] == 0
    assert document["uncaught"] == []
    (cause,) = document["failures"]
    assert cause.startswith("resolve: PlannerError")
    assert json.loads(path.read_text())["timm"]["failures"] == document["failures"]


def test_results_of_other_families_stay(tmp_path) -> None:
    path = tmp_path / "results" / "zoo.json"
    record_results(path, "a", "all", [8], [])
    record_results(path, "b", "all", [8], [])
    assert set(json.loads(path.read_text())) == {"a", "b"}


def test_causes_forget_names_and_numbers() -> None:
    one, two = ValueError("size 3.5 of 'x'\nmore"), ValueError("size 17 of 'yy'")
    assert cause_of(one) == cause_of(two) == "ValueError: size N of '...'"


def test_a_sample_is_spread_over_the_list() -> None:
    names = [str(i) for i in range(10)]
    assert spread(names, 5) == ["0", "2", "4", "6", "8"]
    assert spread(names, None) == spread(names, 20) == names
    assert len(set(names_of("hf"))) == len(names_of("hf")) > 50
    assert summary([])["n"] == 0
