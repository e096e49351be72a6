"""``ddpdoctor attach``: looks at a job that runs now, from outside and without harm, and says why it hangs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ddpdoctor.cli.options import (
    FAIL_ON,
    FORMAT,
    REPORT_DIR,
    VERBOSE,
    FailOn,
    Option,
    ReportFormat,
    settings_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Find out why a job that runs now does not go on, although it was started without ddpdoctor.

    Finds the training ranks of this machine, looks at each twice, and judges what stayed the same. It sends no signal
    and writes nothing into the job. What it saw is saved in a folder; `ddpdoctor analyze` reads the folders of all
    nodes together.
    """

    pid: Annotated[int | None, Option(help="A process of the job: a rank or its launcher.", metavar="PID", min=1)] = (
        None
    )
    job: Annotated[str | None, Option(help="The name of the job, where there are several.", metavar="NAME")] = None
    folder: Annotated[Path, Option(help="Where the folder with what was seen is made.", metavar="DIR")] = Path()
    verbose: Annotated[bool, VERBOSE] = False
    format: Annotated[ReportFormat, FORMAT] = "text"
    fail_on: Annotated[FailOn, FAIL_ON] = "error"
    report_dir: Annotated[Path | None, REPORT_DIR] = None


def run(options: Options) -> int:
    """Look at a running job, judge it, and return the exit status. Raises ``UserError``."""
    from ddpdoctor.attach.session import Options as Wanted
    from ddpdoctor.attach.session import attach
    from ddpdoctor.cli.delivery import Outputs, check_outputs, deliver_check
    from ddpdoctor.cli.output import say
    from ddpdoctor.diagnose.evidence import analyze
    from ddpdoctor.model.findings import now

    outputs = settings_of(options, Outputs)
    check_outputs(outputs)
    started_at = now()
    seen = attach(Wanted(pid=options.pid, job=options.job, output=options.folder))
    say(sys.stderr, f"what was seen is in {seen.folder}")
    return deliver_check(analyze([str(seen.folder)], tuple(sys.argv), started_at, verb="attach"), outputs)
