"""Every command in the documentation parses; the slow test runs them all in order."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer.main

from planner.cli import app, run

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MINE = ("handing-on.md", "tutorials.md")
LIGHT = ("clusters", "models", "schema")


def commands(page: Path) -> list[list[str]]:
    """Argument lists of the ``planner`` lines in a page's bash blocks."""
    found: list[list[str]] = []
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in ("planner", ".venv/bin/planner"):
                found.append([w for w in words[1:] if w != "..."])
    return found


ALL = [(page.name, words) for page in PAGES for words in commands(page)]


def test_there_are_commands() -> None:
    names = {name for name, _ in ALL}
    assert {*MINE, "README.md"} <= names
    assert len(ALL) > 30


@pytest.mark.parametrize(("page", "words"), ALL, ids=lambda v: str(v)[:60])
def test_commands_parse(page: str, words: list[str]) -> None:
    """Name, options and their types; nothing runs."""
    group: Any = typer.main.get_command(app)
    command = group.commands.get(words[0])
    assert command is not None, f"{page}: no command {words[0]}"
    context = command.make_context(words[0], list(words[1:]))
    assert context.command is command


@pytest.mark.parametrize(
    "words", [w for _, w in ALL if w[0] in LIGHT], ids=lambda v: " ".join(v)
)
def test_light_commands_run(words: list[str]) -> None:
    assert run(words) == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", MINE)
def test_commands_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page, in one folder, as a reader would."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if page == "handing-on.md":
        for name, cluster in (("plan.json", "16xA100"), ("other.json", "8xH100")):
            job = ["gpt2", "--cluster", cluster, "--global-batch", "64"]
            assert run(["optimize", *job, "-q", "-o", name]) == 0
    for words in commands(ROOT / "docs" / page):
        assert run(words) == 0, words


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http|#)([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.slow
def test_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples import compare_clusters, plan_and_hand_on

    plan_and_hand_on.main(tmp_path)
    assert (tmp_path / "megatron" / "arguments.txt").exists()
    assert (tmp_path / "report.html").stat().st_size < 6e6
    compare_clusters.main()
    assert "US$ per million samples" in capsys.readouterr().out
