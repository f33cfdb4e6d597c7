"""Memory lines: worked figures from the field and rules that always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.errors import SpecError
from cost_models.memory import (
    MIB,
    RECIPES,
    MemoryInputs,
    ParameterGroup,
    loss_bytes,
    recomputed,
    shortage,
    training_memory,
)
from cost_models.units import GIB

BASE = MemoryInputs(80 * GIB, (ParameterGroup(1_000_000_000),), micro_batches=4)


def test_adam_takes_16_bytes_a_parameter_and_18_with_fp32_gradients():
    lines = training_memory(BASE)
    assert lines.parameters_bytes == 2e9
    assert lines.gradients_bytes == 2e9
    assert lines.optimizer_bytes == 12e9
    lines = training_memory(replace(BASE, recipe=RECIPES["bf16_fp32_gradients"]))
    assert lines.gradients_bytes == 4e9


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [(0, 2, 4, 12), (1, 2, 4, 1.5), (2, 2, 0.5, 1.5), (3, 0.25, 0.5, 1.5)],
)
def test_zero_divides_optimizer_then_gradients_then_parameters(
    zero, parameters, gradients, optimizer
):
    """Distributed optimizer: 6 + 12 / d bytes."""
    lines = training_memory(
        replace(
            BASE,
            zero=zero,
            recipe=RECIPES["bf16_fp32_gradients"],
            groups=(ParameterGroup(1e9, shard=8),),
        )
    )
    assert lines.parameters_bytes == parameters * 1e9
    assert lines.gradients_bytes == gradients * 1e9
    assert lines.optimizer_bytes == optimizer * 1e9


@pytest.mark.parametrize(
    ("optimizer", "states"), [("sgd", 0), ("momentum", 4), ("adam8bit", 2.03125)]
)
def test_other_optimizers(optimizer, states):
    lines = training_memory(replace(BASE, optimizer=optimizer))
    assert lines.optimizer_bytes == (4 + states) * 1e9


def test_experts_are_divided_over_fewer_ranks():
    groups = (ParameterGroup(1e9, shard=8), ParameterGroup(4e9, shard=2))
    lines = training_memory(replace(BASE, groups=groups, zero=1))
    assert lines.optimizer_bytes == 12 * (1e9 / 8 + 4e9 / 2)


def test_7b_does_not_fit_two_16_gb_cards_under_zero_2():
    """FP16 weights alone are 12.385 GiB; ZeRO-3 halves them to 6.2."""
    device = 15.78 * GIB
    x = MemoryInputs(
        device,
        (ParameterGroup(6_649_286_656, shard=2),),
        RECIPES["fp16"],
        offload_optimizer=True,
        zero=2,
        unit_elements=201_400_320,
        arch="volta",
        communicators=1,
    )
    lines = training_memory(x)
    assert lines.parameters_bytes / GIB == pytest.approx(12.385, abs=1e-3)
    assert lines.optimizer_bytes == 0
    assert lines.over_bytes > 0
    assert "missing" in shortage(lines)
    third = training_memory(replace(x, zero=3))
    assert third.parameters_bytes / GIB == pytest.approx(6.193, abs=1e-3)
    assert "free" in shortage(third)


def test_large_vocabulary_logits():
    """11,600 x 248,320: 10.73 GiB per FP32 copy, 28.8 GB at the peak."""
    loss = loss_bytes(11_600, 248_320, "eager")
    assert 11_600 * 248_320 * 4 == 11_522_048_000
    assert loss.peak_bytes == 28_805_120_000
    assert loss.saved_bytes - 2 * 11_600 * 248_320 == 11_522_048_000
    assert loss_bytes(11_600, 248_320, "eager", tp=8).peak_bytes == 3_600_640_000
    assert loss_bytes(11_600, 248_320, "chunked").peak_bytes == 0
    x = replace(
        BASE,
        activation_bytes=1 * GIB,
        logits_bytes=loss.peak_bytes,
        logits_saved_bytes=loss.saved_bytes,
    )
    lines = training_memory(x)
    assert lines.peak_moment == "forward_end"
    assert lines.logits_bytes == loss.peak_bytes


def test_ddp_buckets_are_a_second_copy_of_the_gradients():
    x = replace(
        BASE,
        groups=(ParameterGroup(124_697_433),),
        recipe=RECIPES["fp32"],
        ddp=True,
        micro_batches=1,
    )
    viewed = training_memory(x)
    copied = training_memory(replace(x, bucket_view=False))
    assert copied.total_bytes - viewed.total_bytes == 498_789_732


def test_frozen_parameters_have_no_gradients_and_their_own_storage():
    """6.74 B frozen on 8 ranks: 1.685 GB each in bf16, 3.37 GB upcast."""
    frozen = ParameterGroup(6_738_415_616, 8, trainable=False)
    lora = ParameterGroup(4_194_304, 8)
    x = replace(BASE, groups=(frozen, lora), zero=3)
    lines = training_memory(x)
    lora_bytes = 4_194_304 * 2 / 8
    assert lines.parameters_bytes - lora_bytes == pytest.approx(1.685e9, rel=1e-3)
    assert lines.gradients_bytes == 4_194_304 * 2 / 8
    upcast = replace(frozen, storage_bytes=4.0)
    lines = training_memory(replace(x, groups=(upcast, lora)))
    assert lines.parameters_bytes - lora_bytes == pytest.approx(3.37e9, rel=1e-3)


def test_peak_moment_moves():
    forward = replace(BASE, activation_bytes=GIB, logits_bytes=GIB)
    assert training_memory(forward).peak_moment == "forward_end"
    working = replace(forward, working_bytes=2 * GIB, logits_saved_bytes=0)
    assert training_memory(working).peak_moment == "backward"
    step = replace(BASE, optimizer_temporary=4.0)
    assert training_memory(step).peak_moment == "optimizer_step"


def test_one_micro_batch_has_no_gradients_while_activations_peak():
    x = replace(BASE, activation_bytes=10 * GIB, micro_batches=1)
    lines = training_memory(x)
    assert lines.gradients_bytes == 0
    kept = training_memory(replace(x, gradients_always=True))
    assert kept.total_bytes - lines.total_bytes == pytest.approx(2e9)


def test_in_flight_micro_batches_multiply_activations():
    x = replace(BASE, activation_bytes=GIB, in_flight=3.5)
    assert training_memory(x).activations_bytes == 3.5 * GIB


def test_gathered_units_count_only_under_zero_3():
    x = replace(BASE, unit_elements=1e8, prefetch=2, micro_batches=1)
    assert training_memory(x).gather_buffers_bytes == 0
    groups = (ParameterGroup(1e9, shard=8),)
    third = training_memory(replace(x, zero=3, groups=groups))
    assert third.gather_buffers_bytes >= 2 * 2 * 1e8


def test_reserved_is_beyond_the_allocator():
    lines = training_memory(replace(BASE, arch="hopper", communicators=2))
    assert lines.reserved_bytes == 530 * MIB + 300 * MIB
    assert lines.workspace_bytes == 32 * MIB
    assert lines.allocated_bytes == lines.total_bytes - lines.reserved_bytes
    tenth = training_memory(replace(BASE, fragmentation=0.1))
    plain = training_memory(BASE)
    assert tenth.total_bytes - plain.total_bytes == pytest.approx(
        plain.allocated_bytes / 9
    )


def test_recompute_modes():
    assert recomputed(4, 10.0, 1.0).saved_bytes == 40
    full = recomputed(4, 10.0, 1.0, "full")
    assert (full.saved_bytes, full.working_bytes) == (4, 10)
    part = recomputed(4, 10.0, 1.0, "full", recomputed_layers=1)
    assert (part.saved_bytes, part.working_bytes) == (31, 10)
    some = recomputed(4, 10.0, 1.0, "selective", selective_saved_bytes=6.0)
    assert (some.saved_bytes, some.working_bytes) == (24, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: replace(BASE, zero=4),
        lambda: replace(BASE, optimizer="adam9"),
        lambda: replace(BASE, fragmentation=1.0),
        lambda: ParameterGroup(-1),
        lambda: loss_bytes(1, 1, "best"),
        lambda: recomputed(1, 1, 1, "some"),
        lambda: recomputed(1, 1, 1, "selective"),
    ],
)
def test_bad_numbers_are_refused(call):
    with pytest.raises(SpecError):
        call()
