"""``ddpdoctor diff``: shows what differs between two saved runs, most significant first."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ddpdoctor.cli.options import FORMAT, Argument
from ddpdoctor.model.errors import ExitStatus, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show what differs between a run that works and one that does not.

    Compares versions, variables, settings, machines, model, data, bandwidth and pace.
    """

    first: Annotated[Path, Argument(metavar="RUN_A", help="A run folder, the report.json in it, or a bundle.")]
    second: Annotated[Path, Argument(metavar="RUN_B", help="Another one.")]
    format: Annotated[Literal["text", "json", "markdown", "html", "csv"], FORMAT] = "text"


def run(options: Options) -> int:
    from ddpdoctor.cli.output import show_report
    from ddpdoctor.cli.report import is_same_run, read_run
    from ddpdoctor.diagnose.compare import diff_reports

    if is_same_run(options.first, options.second):
        raise UserError(f"{options.first} and {options.second} are the same run", help="Give two runs.")
    first, second = ((str(path), read_run(path)) for path in (options.first, options.second))
    show_report(diff_reports(first, second), options.format, sys.stdout, None)
    return ExitStatus.OK
