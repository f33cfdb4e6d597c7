"""Options and fixtures that all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# one run is like the next: a machine under load is no failure, and a new example that
# fails is found by a developer's run, not by somebody else's change
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the golden files with what the code makes now",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten rather than compared."""
    return bool(request.config.getoption("--update-golden"))
