"""Says which scenarios are run first, and lends them hosts and a Slurm."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.first import FIRST
from tests.scenarios.hosts import Hosts, lent_hosts
from tests.scenarios.slurm import Slurm, lent_slurm

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the README's test command leaves to the second half of ``.ci/run``."""
    for item in items:
        if str(item.path).startswith(f"{HERE}/") and not is_first(item):
            item.add_marker(pytest.mark.full)


def is_first(item: pytest.Item) -> bool:
    """Return whether a scenario is one of those that are run first. One that goes by speed never is."""
    listed = FIRST.get(item.path.relative_to(HERE).as_posix(), ("-",))
    return item.name.startswith(listed) and item.get_closest_marker("alone") is None


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Lend two hosts, or as many as the test module's ``HOSTS`` says."""
    with lent_hosts(getattr(request.module, "HOSTS", 2)) as lent:
        yield lent


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """Lend a Slurm on these hosts, which see their own processes only if the test module says ``OWN_PIDS``."""
    own_pids = getattr(request.module, "OWN_PIDS", False)
    # Not pytest's own folder: only its owner may enter that, and neither munged nor other users of Slurm could.
    with (
        tempfile.TemporaryDirectory(prefix="ddpdoctor-slurm-", ignore_cleanup_errors=True) as folder,
        lent_slurm(hosts, Path(folder), own_pids=own_pids) as lent,
    ):
        yield lent
