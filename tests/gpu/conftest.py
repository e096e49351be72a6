"""Options, the jobs' runner, and the saving of each outcome, for the tests that need a GPU.

``--gpu-results DIR`` (or $OUT) is where everything is saved. ``--gpu-deadline`` is how long all jobs together may take:
a test whose job was not begun by then is skipped as "not reached". ``--gpu-dry-run`` runs the jobs on the CPU over
Gloo, to try the tests themselves, and keeps nothing. pytest knows these options where it is given this folder, or no
path at all; with ``pytest tests`` it reads this file too late for them, and the defaults hold.
"""

import importlib.util
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.catalog import JOBS, ONLY_A_DEVICE
from tests.gpu.running import CUT_OFF, NOT_REACHED, Done, Runner
from tests.gpu.saving import Results, read_machine

DEADLINE_S = 540.0
"""A machine is lent for 10 minutes at a time; what is saved has to come back within them."""
MOST_BESIDE = 4
"""Jobs that run side by side: eight ranks share the GPU then."""
CORES_EACH = 4
RESULTS = pytest.StashKey[Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu")
    group.addoption("--gpu-results", metavar="DIR", help="save what the GPU tests saw here [default: $OUT]")
    group.addoption("--gpu-deadline", metavar="SECONDS", type=float, default=DEADLINE_S, help="for all jobs together")
    group.addoption("--gpu-dry-run", action="store_true", help="run their jobs on the CPU, to try the tests themselves")
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "read where pytest-timeout is installed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout(seconds): read where pytest-timeout is installed")
    if config.getoption("--gpu-dry-run", default=False) and config.getoption("--gpu-results", default=None):
        raise pytest.UsageError("--gpu-dry-run shows nothing of a GPU: its results are not saved")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests into the order of their jobs, and skip what cannot run here."""
    here = f"{Path(__file__).parent}/"
    own = [item for item in items if str(item.path).startswith(here) and item.get_closest_marker("gpu_job") is not None]
    reason = why_not(dry=config.getoption("--gpu-dry-run", default=False))
    for item in own:
        item.add_marker(pytest.mark.timeout(config.getoption("--gpu-deadline", default=DEADLINE_S) + 60))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif config.getoption("--gpu-dry-run", default=False) and any(JOBS[name].cuda_only for name in jobs_of(item)):
            item.add_marker(pytest.mark.skip(reason="a dry run shows nothing of this: it is about CUDA"))
    order = list(JOBS)
    own.sort(key=lambda item: max(order.index(name) for name in jobs_of(item)))
    others = set(items) - set(own)
    items[:] = [item for item in items if item in others] + own


def jobs_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the names of the jobs that a test looks at."""
    marker = item.get_closest_marker("gpu_job")
    return tuple(marker.args) if marker is not None else ()


def why_not(*, dry: bool) -> str:
    """Return why the jobs cannot run here; empty where they can."""
    import torch

    if "PYTEST_XDIST_WORKER" in os.environ and (dry or torch.cuda.is_available()):
        return "run these tests without -n: they run their jobs side by side themselves"
    return "" if dry or torch.cuda.is_available() else "needs a GPU: torch.cuda.is_available() is False here"


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Runner]:
    """Run the jobs of the tests that were selected."""
    dry = request.config.getoption("--gpu-dry-run", default=False)
    asked = None if dry else request.config.getoption("--gpu-results", default=None) or os.environ.get("OUT")
    results = Results(Path(asked) if asked else tmp_path_factory.mktemp("gpu-results"), read_machine())
    request.config.stash[RESULTS] = results
    wanted = {name for item in request.session.items if not _is_skipped(item) for name in jobs_of(item)}
    running = Runner(
        [job for name, job in JOBS.items() if name in wanted], tmp_path_factory.mktemp("jobs"),
        width=max(1, min(MOST_BESIDE, (os.cpu_count() or 1) // CORES_EACH)),
        limit_s=request.config.getoption("--gpu-deadline", default=DEADLINE_S), ended=results.job_ended, dry=dry,
    )  # fmt: skip
    yield running
    running.close()


def _is_skipped(item: pytest.Item) -> bool:
    return item.get_closest_marker("skip") is not None


@pytest.fixture
def ran(request: pytest.FixtureRequest, runner: Runner) -> Callable[[str], Done]:
    """Return a job of this test once it has ended."""

    def one(name: str) -> Done:
        assert name in jobs_of(request.node), f"{name} is not among the jobs that this test is marked with"
        done = runner(name)
        if done.problem in {NOT_REACHED, CUT_OFF}:
            pytest.skip(f"{done.problem}: the time for all jobs was over")
        assert not done.problem, f"{done.problem}: {done.stderr[-2000:]}"
        return done

    return one


@pytest.fixture
def dry(request: pytest.FixtureRequest) -> bool:
    """Whether the jobs ran on the CPU."""
    return bool(request.config.getoption("--gpu-dry-run", default=False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Save each outcome at once."""
    report = yield
    results = item.config.stash.get(RESULTS, None)
    over = report.when == "call" or (report.when == "setup" and not report.passed)
    if results is not None and over and jobs_of(item):
        results.test_ended(item.name, (item.obj.__doc__ or "").strip(), report.outcome, _reason(report))  # type: ignore[attr-defined]
    return report


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return str(report.longrepr)[-1500:] if report.failed else ""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results = config.stash.get(RESULTS, None)
    if results is not None:
        kept = "a dry run, not kept" if config.getoption("--gpu-dry-run", default=False) else "start with summary.md"
        terminalreporter.write_line(f"GPU tests: {results.folder} ({kept})")
        terminalreporter.write_line(
            f"Only a real device shows {', '.join(ONLY_A_DEVICE)}; the rest runs in tests/standin"
        )
