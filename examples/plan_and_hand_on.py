"""Plan GPT-2 on two nodes, say why, and write it for two frameworks."""

from __future__ import annotations

import sys
from pathlib import Path

import planner
from planner.explain import explain, render
from planner.export import export
from planner.report.html import page


def main(folder: Path) -> None:
    """Writes the plan, its page and two exports into ``folder``."""
    workload = planner.Training(global_batch=64, seq_len=1024)
    plan = planner.optimize("gpt2", cluster="16xA100", workload=workload)
    plan.save(folder / "plan.json")
    print(render(explain(plan)))
    (folder / "report.html").write_text(page(plan), encoding="utf-8")
    for target in ("megatron", "torchtitan"):
        found = export(plan, target)
        found.write(folder / target)
        for gap in found.gaps:
            print(f"{target}: {gap}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
