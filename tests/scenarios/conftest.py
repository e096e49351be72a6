"""Says which scenarios are run first, and lends them Pythons that have torch loaded."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded import preloaded
from tests.scenarios.first import FIRST
from tests.scenarios.hosts import Hosts, lent_hosts
from tests.scenarios.slurm import Slurm, lent_slurm

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


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Lend two hosts, or as many as the test module's ``HOSTS`` says."""
    with lent_hosts(getattr(request.module, "HOSTS", 2)) as lent:
        yield lent


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Lend a Slurm on these hosts."""
    # Not pytest's own folder: only its owner may enter that, and munged minds.
    with lent_slurm(hosts, tmp_path_factory.mktemp("slurm")) as lent:
        yield lent
