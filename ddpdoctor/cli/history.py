"""``ddpdoctor history``: shows each start of a job that restarts."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ddpdoctor.cli.options import FORMAT, Argument
from ddpdoctor.cli.report import RUNS, read_run
from ddpdoctor.cli.status import StatusFormat
from ddpdoctor.model.errors import ExitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the restarts of a job and what they cost.

    Shows how and why each start ended, the steps and time lost, and which rank or host keeps failing. Counts the
    attempts of torchrun and the runs that a scheduler started again.
    """

    folder: Annotated[Path, Argument(metavar="[DIR]", help="A folder with run folders, or one of them.")] = Path(RUNS)
    format: Annotated[StatusFormat, FORMAT] = "text"


def run(options: Options) -> int:
    from ddpdoctor.cli.output import has_color, read_cwd, read_width, write
    from ddpdoctor.diagnose.live import read_histories

    jobs, unread = read_histories(options.folder, read_run)
    if options.format == "json":
        from ddpdoctor.report.formats import write_json
        from ddpdoctor.report.verbs.live import plain_histories

        write(sys.stdout, write_json(plain_histories(jobs, unread), indent=1))
        return ExitStatus.OK
    from ddpdoctor.report.verbs.live import render_history

    width, color = read_width(sys.stdout), has_color(sys.stdout, os.environ)
    write(sys.stdout, render_history(jobs, unread, width=width, color=color, cwd=read_cwd()))
    return ExitStatus.OK
