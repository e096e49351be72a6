"""Says which scenarios are run first, and lends them hosts and a Slurm."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import kept
from tests.kept import way_of
from tests.scenarios.control_groups import lent_groups
from tests.scenarios.first import FIRST, NIGHT, SECOND
from tests.scenarios.hosts import Hosts, lent_hosts
from tests.scenarios.slurm import Slurm, lent_slurm

HERE = Path(__file__).parent


RECORD = os.environ.get("KEPT_RUNS", "").split("\n")
"""``record`` and names of tests, where ``tests/record.py`` is at work."""


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have each test marked ``kept`` judge the run that is kept, and another one."""
    if metafunc.definition.get_closest_marker("kept") and "tmp_path" in metafunc.fixturenames:
        metafunc.fixturenames.append("way")
        metafunc.parametrize("way", ["kept", "real"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the README's test command leaves to ``.ci/run``, and that to a run by night."""
    for item in items:
        if not str(item.path).startswith(f"{HERE}/") or way_of(item) == "kept":
            continue
        if not is_listed(item, FIRST):
            item.add_marker(pytest.mark.full)
            if not is_listed(item, SECOND) if way_of(item) else is_listed(item, NIGHT):
                item.add_marker(pytest.mark.nightly)
    left_out = [item for item in items if way_of(item) == "kept" and item.get_closest_marker("live")]
    if RECORD[0] == "record":
        named = [item for item in items if not RECORD[1:] or any(name in item.nodeid for name in RECORD[1:])]
        again = [item for item in named if way_of(item) == "real" and not item.get_closest_marker("live")]
        left_out = [item for item in items if item not in again]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Take the jobs of a test from what is kept, or keep them."""
    way = way_of(item)
    if not way:
        return (yield)
    test = item.nodeid.removesuffix("]").removesuffix(way).rstrip("-[")
    turn = kept.Turn(test, "record" if RECORD[0] == "record" else way, item.funcargs["tmp_path"])  # type: ignore[attr-defined]
    with kept.turn_of(turn):
        return (yield)


def is_listed(item: pytest.Item, lists: dict[str, tuple[str, ...]]) -> bool:
    """Return whether a scenario is one of a list. One that goes by speed never is."""
    name = item.name.removesuffix("real]").rstrip("-[")
    listed = lists.get(item.path.relative_to(HERE).as_posix(), ())
    return any(f"{name}]".startswith(one) for one in listed) and item.get_closest_marker("alone") is None


@pytest.fixture
def group() -> Iterator[Callable[..., tuple[str, ...]]]:
    """Lend control groups."""
    with lent_groups() as make:
        yield make


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
