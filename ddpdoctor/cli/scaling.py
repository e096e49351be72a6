"""Launches a job with several numbers of ranks, each beside its baselines, for ``tune --scaling``."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.cli.launches import THREADS, with_threads
from ddpdoctor.cli.output import save_report, say, show_report
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.findings import now
from ddpdoctor.model.tuning import LaunchKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ddpdoctor.diagnose.tuning import LaunchFolder
    from ddpdoctor.launch.command_line import SplitCommand, WrapOptions
    from ddpdoctor.launch.session import JobOutcome

MOST_RANKS = 64
"""Our choice: more ranks on one machine tell nothing."""
WORDS = {
    LaunchKind.ALONE: "one rank with all cores",
    LaunchKind.SHARE: "one rank with its share of the cores",
    LaunchKind.JOB: "all ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLaunch:
    """One launch."""

    kind: LaunchKind
    ranks: int

    @property
    def processes(self) -> int:
        """How many ranks are started."""
        return self.ranks if self.kind is LaunchKind.JOB else 1

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.kind.value}-{self.ranks}"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks in "1,2,4", by size. Raises ``UserError``."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and 0 < int(word) <= MOST_RANKS for word in words) or not any(
        word != "1" for word in words
    ):
        raise UserError(
            f"--scaling is {text!r}, which is not a list of rank counts",
            help=f"Give numbers from 1 to {MOST_RANKS}, one of them above 1: --scaling 1,2,4.",
        )
    return tuple(sorted({int(word) for word in words}))


def plan_launches(sizes: tuple[int, ...]) -> tuple[PlannedLaunch, ...]:
    """Return the launches: one rank alone, and for each larger number its share and the job itself."""
    larger = [size for size in sizes if size > 1]
    pairs = [
        PlannedLaunch(kind=kind, ranks=size) for size in larger for kind in (LaunchKind.SHARE, LaunchKind.JOB)
    ]  # fmt: skip
    return (PlannedLaunch(kind=LaunchKind.ALONE, ranks=1), *pairs)


def measure_sizes(
    split: SplitCommand,
    sizes: tuple[int, ...],
    prepare: Callable[[SplitCommand, Path | None], WrapOptions],
    launch: Callable[[WrapOptions], tuple[JobOutcome, bool]],
) -> int:
    """Launch the job with each number of ranks, show the efficiency, and return the exit status.

    Args:
        split: The command line, without a number of ranks.
        sizes: The numbers of ranks.
        prepare: Prepares one launch in a folder; None is the usual one.
        launch: Runs it, and returns whether its trial has a result.

    Raises:
        UserError: the command line does not allow that.
    """
    from ddpdoctor.diagnose.tuning import LaunchFolder, build_scaling_report

    _check(split)
    started_at, planned = now(), plan_launches(sizes)
    first = prepare(_with_ranks(split, 1), None)
    done: list[LaunchFolder] = []
    for number, one in enumerate(planned, 1):
        say(sys.stderr, f"launch {number} of {len(planned)}: {WORDS[one.kind]}, for {one.ranks}")
        folder = first.report_dir / one.name
        with _share_of(one):
            outcome, has_result = launch(prepare(_with_ranks(split, one.processes), folder))
        if not has_result:
            say(sys.stderr, f"no efficiency: launch {number} has no result; its run folder is {folder}")
            return outcome.exit_status or ExitStatus.INCONCLUSIVE
        done.append(LaunchFolder(kind=one.kind, ranks=one.ranks, folder=outcome.folder))
    report = build_scaling_report(done, first.command, started_at, _notes(sizes))
    save_report(first.report_dir, report)
    show_report(report, first.format, sys.stderr, first.report_dir)
    return ExitStatus.OK


def _check(split: SplitCommand) -> None:
    if split.is_command:
        raise UserError(
            "--scaling needs a script, because it chooses the number of ranks",
            help="Give the script: ddpdoctor tune --scaling 1,2,4 train.py",
        )
    if any(word.startswith(("--nproc", "--nnodes")) for word in split.torchrun):
        raise UserError(
            "--scaling cannot be used with --nproc-per-node or --nnodes",
            help="Leave them out.",
        )


def _with_ranks(split: SplitCommand, count: int) -> SplitCommand:
    return replace(split, torchrun=(*split.torchrun, f"--nproc-per-node={count}"))


@contextmanager
def _share_of(launch: PlannedLaunch) -> Iterator[None]:
    """Give one rank the cores and threads that it has among all ranks. The launcher inherits both."""
    if launch.kind is not LaunchKind.SHARE:
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[: max(1, len(cores) // launch.ranks)])
    try:
        with with_threads(os.environ.get(THREADS) or "1"):  # torchrun sets 1 where there are several ranks
            yield
    finally:
        os.sched_setaffinity(0, cores)


def _notes(sizes: tuple[int, ...]) -> tuple[str, ...]:
    cores = len(os.sched_getaffinity(0))
    if max(sizes) <= cores:
        return ()
    note = f"{cores} cores for up to {max(sizes)} ranks: contention includes the cost of sharing cores"
    return (note,)
