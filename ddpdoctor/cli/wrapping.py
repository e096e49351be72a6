"""What ``wrap`` does once its command line is read, by Typer or without."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ddpdoctor.cli.durations import parse_duration
from ddpdoctor.cli.plain import DEBUG_VARIABLE
from ddpdoctor.cli.running import Request, prepare, run_and_show, run_under_outer
from ddpdoctor.launch.nested import find_outer_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.cli.plain import Asked
    from ddpdoctor.launch.options import DebugLevel


def run_wrap(asked: Asked) -> int:
    """Run the job, show what came of it, and return the exit status."""
    outer = find_outer_run(os.environ)
    options = prepare(
        Request(
            split=asked.split,
            hang_timeout_s=parse_duration(asked.hang_timeout, "--hang-timeout"),
            on_hang=asked.on_hang,
            debug_level=choose_debug_level(asked.debug_level, os.environ),
            report_dir=asked.report_dir,
            format=asked.format,
            quiet=asked.quiet,
            ignore=asked.ignore,
            command=tuple(sys.argv),
        ),
        os.environ,
        outer,
    )
    if outer is not None:
        run_under_outer(options)
    return run_and_show(options).exit_status


def choose_debug_level(asked: DebugLevel | None, env: Mapping[str, str]) -> DebugLevel | None:
    """DETAIL where nobody asked for anything; None leaves what the environment says."""
    if asked is not None:
        return asked
    return None if env.get(DEBUG_VARIABLE) else "DETAIL"
