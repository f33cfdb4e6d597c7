"""The GPU script starts without a GPU and finds the specs of GPUs by CUDA's names."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_check


def test_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
    ],
)
def test_devices_by_their_cuda_name(name: str, spec: str) -> None:
    assert gpu_check.find_device(name).name.startswith(spec)
