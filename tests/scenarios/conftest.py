"""Says which scenarios are run first, and lends them Pythons that have torch loaded."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded import preloaded
from tests.scenarios.first import FIRST

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the README's test command leaves to the second half of ``.ci/run``."""
    for item in items:
        if HERE in item.path.parents and not is_first(item):
            item.add_marker(pytest.mark.full)


def is_first(item: pytest.Item) -> bool:
    """Return whether a scenario is one of those that are run first."""
    return item.name.startswith(FIRST.get(item.path.relative_to(HERE).as_posix(), ("-",)))


@pytest.fixture
def preloaded_python(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have a test's jobs start from a Python that has torch loaded; without it each starts as ever."""
    cold = request.node.get_closest_marker("cold") is not None
    with contextlib.nullcontext() if cold else preloaded():
        yield
