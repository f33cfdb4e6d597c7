"""How long the search takes, in fresh processes, and how it grows.

``python -m benchmarks.search [--case NAME ...] [--growth]`` runs ``planner optimize``
(trace included) per case and prints one JSON document last: wall seconds, peak memory,
gap and what was enumerated, per (model, cluster), and with ``--growth`` the ratio of
search time from 12 to 96 layers and from 64 to 16384 GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

#: name: (model, cluster, global batch, sequence length or None)
CASES: dict[str, tuple[str, str, int, int | None]] = {
    "gpt3-64": ("gpt3-175b", "64xA100", 512, 2048),
    "gpt3-1024": ("gpt3-175b", "1024xA100", 1536, 2048),
    "llama3-8b": ("llama3-8b", "64xH100", 512, None),
    "llama3-70b": ("llama3-70b", "64xH100", 512, None),
    "llama3-405b": ("llama3-405b", "16384xH100", 2048, None),
    "deepseek-v3": ("deepseek-v3", "2048xH800", 8192, None),
    "mixtral-8x7b": ("mixtral-8x7b", "32xA100", 256, None),
    "bert-large": ("bert-large", "8xV100", 256, None),
    "vit-l16": ("vit-l16", "8xA100", 1024, None),
    "resnet50": ("resnet50", "8xA100", 2048, None),
    "wide-resnet": ("wide-resnet", "64xV100-16GB", 1536, None),
}

CHILD = """
import json, resource, sys, time
start = time.perf_counter()
import planner
model, cluster, batch, seq, layers = json.loads(sys.argv[1])
precision = "fp16" if "V100" in cluster else "bf16"
training = planner.Training(global_batch=batch, seq_len=seq, precision=precision)
if layers:
    from benchmarks.search import gpt_of
    model = gpt_of(layers)
searched = time.perf_counter()
plan = planner.optimize(model, cluster, training)
now = time.perf_counter()
c = plan.certificate
print(json.dumps({
    "wall_s": now - start,
    "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    "step_time_s": plan.estimate.step_time_s, "mfu": plan.estimate.mfu,
    "split": plan.parallelism.label(), "gap": c.gap, "status": c.status,
    "enumerated": c.enumerated, "solved": c.solved, "optimize_s": now - searched,
    "violations": len(plan.check()),
}))
"""


def gpt_of(layers: int) -> Any:
    """A GPT of hidden size 4096 with ``layers`` layers, as a factory."""

    def build() -> Any:
        import torch

        from planner.presets import PRESETS, Shape
        from planner.presets.gpt import GPT, GPTConfig

        with torch.device("meta"):
            model = GPT(GPTConfig(layers, 4096, 32), 2048)
            inputs = PRESETS["gpt2"].inputs(Shape(2048, torch.bfloat16, True))
        return model.to(torch.bfloat16), (), dict(inputs)

    return build


def run(
    model: str, cluster: str, batch: int, seq: int | None, layers: int = 0
) -> dict[str, Any]:
    """One case in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([model, cluster, batch, seq, layers])],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def growth() -> dict[str, float]:
    """Time of ``optimize`` as layers and GPUs grow."""
    few = run("", "64xA100", 512, 2048, layers=12)["optimize_s"]
    many = run("", "64xA100", 512, 2048, layers=96)["optimize_s"]
    small = run("llama3-8b", "64xH100", 2048, None)["optimize_s"]
    large = run("llama3-8b", "16384xH100", 16384, None)["optimize_s"]
    return {"layers_12_to_96": many / few, "gpus_64_to_16384": large / small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument("--growth", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {"load": os.getloadavg()[0], "cases": {}}
    for name in options.case or CASES:
        found = run(*CASES[name])
        result["cases"][name] = found
        print(name, found, file=sys.stderr)
    if options.growth:
        result["growth"] = growth()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
