"""What the launches of one command share, where it launches a job several times: ``tune`` and ``tune --scaling``."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.cli.running import run_and_show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.cli.running import MakeReport
    from ddpdoctor.launch.command_line import WrapOptions
    from ddpdoctor.launch.session import JobOutcome

THREADS = "OMP_NUM_THREADS"


def launch_quietly(prepared: WrapOptions, make_report: MakeReport) -> JobOutcome:
    """Run one of several launches. Its report is shown if something is wrong."""
    return run_and_show(replace(prepared, quiet=True), make_report=make_report)


@contextmanager
def with_threads(count: str) -> Iterator[None]:
    """Give ranks a number of threads. The launcher inherits it."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = count
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before
