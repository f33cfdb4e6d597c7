"""Stack profiles: every name loads, and constants stay physical."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.errors import SpecError
from cost_models.stacks import load_stack, stack_names

NAMES = ("eager", "compiled", "megatron", "fsdp", "nanotron", "nemo", "trtllm", "vllm")
NAMES += ("sglang", "fastertransformer", "lmdeploy", "gptfast")


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_has_a_name_and_says_what_it_is(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert name in stack_names()
    assert stack.description
    assert 0 <= stack.launch_s < 1e-4


def test_compiled_fuses_and_launches_less_than_eager() -> None:
    eager, compiled = load_stack("eager"), load_stack("compiled")
    assert compiled.fused_pointwise
    assert not eager.fused_pointwise
    assert compiled.launch_s < eager.launch_s


def test_an_unknown_stack_is_refused_with_the_known_names() -> None:
    with pytest.raises(SpecError, match="megatron"):
        load_stack("caffe")


@pytest.mark.parametrize(
    "change",
    [{"dp_overlap": 1.5}, {"launch_s": -1e-6}, {"attention_kernel": "magic"}],
)
def test_unphysical_constants_are_refused(change) -> None:
    with pytest.raises(SpecError):
        replace(load_stack("eager"), **change)
