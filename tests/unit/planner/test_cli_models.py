"""``planner models`` lists every preset."""

from __future__ import annotations

import json

import pytest

from planner.cli import run

#: Names that users and scripts rely on.
PRESETS = {
    "gpt3-175b",
    "gpt-22b",
    "gpt-530b",
    "gpt-1t",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "mixtral-8x7b",
    "deepseek-v3",
    "qwen3-30b-a3b",
    "bert-large",
    "t5-11b",
    "vit-l16",
    "resnet50",
    "wide-resnet",
    "unet-sd",
    "gpt2",
}


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert run(["models", "--json"]) == 0
    found = {m["name"]: m["description"] for m in json.loads(capsys.readouterr().out)}
    assert found.keys() >= PRESETS
    assert all(found.values())
