"""What is the same job worth on three clusters? Step, dollars, and what binds."""

from __future__ import annotations

import planner


def main() -> None:
    """Prints a row per cluster."""
    workload = planner.Training(global_batch=64, seq_len=1024)
    for cluster in ("16xA100", "16xA100@100Gbps", "8xH100"):
        plan = planner.optimize("gpt2", cluster=cluster, workload=workload)
        e = plan.estimate
        dollars = (e.cost_per_hour or 0.0) / 3600 / e.samples_per_s * 1e6
        waits = sum(v for k, v in e.breakdown.parts().items() if k.endswith("comm"))
        print(
            f"{cluster:<16} {e.step_time_s * 1e3:7.1f} ms  MFU {e.mfu:5.1%}  "
            f"{dollars:7.2f} US$ per million samples  "
            f"{waits / e.step_time_s:5.1%} tensor, context and expert traffic  "
            f"{plan.parallelism.label()}"
        )


if __name__ == "__main__":
    main()
