"""What ``wrap`` does once its command line is read, by Typer or without."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ddpdoctor.cli.durations import parse_duration
from ddpdoctor.cli.running import Request, outcome_report, prepare, run_and_show, run_under_outer
from ddpdoctor.launch.processes.nested import find_outer_run
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus, has_found
from ddpdoctor.model.findings import Severity

if TYPE_CHECKING:
    from ddpdoctor.cli.plain import Asked

MAX_DIGITS = 9
"""Of a number of steps. Ours: no training has more."""
MAX_PORT = 65_535


def run_wrap(asked: Asked) -> int:
    """Run the job, show what came of it, and return the exit status."""
    outer = find_outer_run(os.environ)
    options = prepare(
        Request(
            split=asked.split,
            hang_timeout_s=parse_duration(asked.hang_timeout, "--hang-timeout"),
            on_hang=asked.on_hang,
            debug_level=asked.debug_level,
            report_dir=asked.report_dir,
            format=asked.format,
            quiet=asked.quiet,
            ignore=asked.ignore,
            # Under another wrap the variable is what that one told its ranks, and its own options hold.
            check_every=0 if asked.no_consistency or outer is not None else parse_check_every(asked.check_every),
            allow_different=asked.allow_different,
            exchange_port=parse_port(asked.exchange_port),
            command=tuple(sys.argv),
        ),
        os.environ,
        outer,
    )
    if outer is not None:
        run_under_outer(options)
    outcome = run_and_show(options)
    least = None if asked.fail_on == "never" else Severity(asked.fail_on)
    if outcome.exit_status == 0 and has_found(outcome_report(options, outcome), least):
        return ExitStatus.FOUND
    return outcome.exit_status


def parse_check_every(text: str) -> int:
    """Return every how many steps replicas are compared. Raises ``UserError`` for what is no whole number from 1."""
    told = text.strip()
    steps = int(told) if told.isascii() and told.isdecimal() and len(told) <= MAX_DIGITS else 0
    if steps > 0:
        return steps
    raise UserError(
        f"--check-every is {text!r}, which is no whole number of steps from 1",
        help="Give a number of optimizer steps, as 50, or turn the comparison off with --no-consistency.",
    )


def parse_port(text: str | None) -> int | None:
    """Return the port that --exchange-port names. Raises ``UserError`` for what is none."""
    if text is None:
        return None
    told = text.strip()
    port = int(told) if told.isascii() and told.isdecimal() and len(told) <= MAX_DIGITS else 0
    if 0 < port <= MAX_PORT:
        return port
    raise UserError(
        f"--exchange-port is {text!r}, which is no port",
        help=f"Give a number from 1 to {MAX_PORT}, on all nodes the same.",
    )
