"""The page in a real browser: no errors, figures drawn, interactions work.

Needs a Chromium; without one on the path these tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from planner.plan import Plan
from planner.report.html import page
from planner.workload import Parallelism
from tests.unit.planner.export.plans import plan_of
from tests.unit.planner.plan_samples import sample

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=8000",
    "--dump-dom",
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")

_FOLDER = Path(__file__).parent
_FIRST = f"<script>{(_FOLDER / 'first.js').read_text()}</script>"
_PROBE = f"<script>{(_FOLDER / 'probe.js').read_text()}</script>"


def probe(text: str, folder: Path, width: int) -> dict[str, Any]:
    """What the page says about itself after it was drawn and used."""
    file = folder / "page.html"
    text = text.replace("<head>", "<head>" + _FIRST, 1)
    file.write_text(text.replace("</body>", _PROBE + "</body>", 1), encoding="utf-8")
    assert BROWSER is not None
    run = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},900",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', run.stdout, re.DOTALL)
    assert found, run.stderr[-2000:]
    return json.loads(unescape(found[1]))


def large() -> Plan:
    """As many pieces as GPT-3 on 64 GPUs: 8 stages of 12 chunks, 256 micro-batches."""
    shape = Parallelism(tp=4, pp=8, dp_shard=2, vpp=12, zero=1)
    return plan_of(shape, 512, layers=96)


@pytest.mark.parametrize("width", [1280, 390])
def test_it_draws_and_answers(tmp_path: Path, width: int) -> None:
    plan = large()
    text = page(plan, reprice=False)
    assert len(text.encode()) < 6e6
    found = probe(text, tmp_path, width)
    assert found["faults"] == []
    assert found["ready"] == "yes"
    assert found["drawn_ms"] < 3000
    assert found["mem"] >= 8 * 5
    assert found["fall"] >= 3
    assert found["node"] >= 3
    assert found["gpu"] == 64
    assert found["traffic"] >= 2
    assert found["rows"] == 1 + 1 + len(plan.alternatives)
    assert found["untold"] == 0  # every figure says where it is from
    assert found["overflow"] <= 0
    assert found["colours"] > 3
    assert found["zoomed"]
    assert found["whole"]
    assert found["themes"][0] != found["themes"][1]
    assert found["group"] == 8  # one pipeline: a rank of each stage
    assert "source:" in found["tip"]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    plan = sample()
    nasty = (
        "</script><script>faults.push('ran')</script><img src=x onerror=faults.push(1)>"
    )
    model = plan.model.model_copy(update={"name": nasty})
    edited = plan.model_copy(update={"model": model, "warnings": (nasty,)})
    found = probe(page(edited, reprice=False), tmp_path, 1280)
    assert found["faults"] == []
    assert found["ready"] == "yes"
