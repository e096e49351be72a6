"""Lets several processes run tests side by side, and gives those marked ``alone`` the machine for themselves.

All clones on a machine share the locks, so that the tests of one do not disturb those of another.

Such a test goes by how fast something is, or by what the kernel counts for the whole machine. It takes the lock of the
machine exclusively, which all others share, as they do that of the queue while they come in. One that is to run alone
holds the queue exclusively, so that none overtakes it.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.kept import way_of
from tests.preloaded import preloaded

pytest.register_assert_rewrite("tests.golden")

QUEUE, MACHINE = (Path(tempfile.gettempdir(), f"ddpdoctor-tests-{name}-{os.getuid()}") for name in ("queue", "machine"))
LONGEST_WAIT_S = 600.0
"""A process that a test has left behind may hold a lock: then the others go on all the same."""

_kept: list[contextlib.AbstractContextManager[None]] = []
"""The machine, between two tests that run alone."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
"""Otherwise each Python that a test starts compiles all of ddpdoctor, and pytest all tests, anew each time."""

os.environ["OMP_NUM_THREADS"] = "1"
"""A rank with as many threads as the machine has cores is slow if two ranks share them."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores it, and so would all that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have each of several processes import another part of all tests first, and look for no garbage in what stays.

    All of them import all tests. In the same order, each would compile every file of a fresh clone by itself.
    """
    gc.disable()
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not number or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(file for path in session.config.args for file in Path(path).rglob("test_*.py"))
    start = len(files) * int(number) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in files[start:] + files[:start]:
        # Pytest imports it again, and reports what is wrong.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Look for garbage in what tests make, and no more in modules and tests."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that run alone first: all others wait meanwhile, and at the end none is left to wait for."""
    items.sort(key=lambda item: not _is_alone(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Wait for the machine before the clock of the test's time limit starts."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    if not _is_alone(item):
        with _machine(alone=False):
            return (yield)
    if not _kept:
        _kept.append(_machine(alone=True))
        _kept[0].__enter__()
    try:
        return (yield)
    finally:
        if nextitem is None or not _is_alone(nextitem):
            _kept.pop().__exit__(None, None, None)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Give each test the environment that it found: verbs and torch set variables, which later commands inherit."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before.items() - after.items())


@pytest.fixture
def preloaded_python(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have a test's jobs start from a Python that has torch loaded; without it each starts as ever."""
    cold = request.node.get_closest_marker("cold") is not None or way_of(request.node) == "kept"
    with contextlib.nullcontext() if cold else preloaded():
        yield


def _is_alone(item: pytest.Item) -> bool:
    """Return whether a test goes by speed. A kept run was fast enough, and one that is recorded is tried again."""
    recorded = way_of(item) == "kept" or "KEPT_RUNS" in os.environ
    return item.get_closest_marker("alone") is not None and not recorded


@contextlib.contextmanager
def _machine(*, alone: bool) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        with _locked(QUEUE, how):
            held.enter_context(_locked(MACHINE, how))
        yield


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    place = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LONGEST_WAIT_S
    try:
        while not _try_lock(place, how) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
    finally:
        os.close(place)


def _try_lock(place: int, how: int) -> bool:
    try:
        fcntl.flock(place, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
