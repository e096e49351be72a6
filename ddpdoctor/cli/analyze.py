"""``ddpdoctor analyze``: finds the cause from logs, dumps and stacks of a job that ran without ddpdoctor."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli.options import HTML, Argument, ReportOptions
from ddpdoctor.model.findings import now

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ReportOptions):
    """Find out why a job failed or hung from the files it left behind.

    Reads logs, flight recorder dumps, stacks, and messages of NCCL, Slurm and the kernel, also compressed. Nothing in
    them is executed. If they do not show the cause, the report lists what to collect.
    """

    paths: Annotated[tuple[str, ...], Argument(metavar="PATH", help="Files or folders that the job left; - is stdin.")]
    html: Annotated[Path | None, HTML] = None


def run(options: Options) -> int:
    from ddpdoctor.cli.output import check_outputs, deliver_check

    outputs = check_outputs(options)
    return deliver_check(read_paths(options.paths, tuple(sys.argv)), outputs)


def read_paths(paths: tuple[str, ...], command: tuple[str, ...]) -> Report:
    """Return the report of what a job left behind. Raises ``UserError``."""
    from ddpdoctor.cli.report import RUN_MARK, read_run
    from ddpdoctor.diagnose.logs import analyze
    from ddpdoctor.recorder.storage.files import is_file

    path = Path(paths[0])
    if len(paths) == 1 and is_file(path / RUN_MARK):
        return read_run(path)  # a run of `wrap` has been judged with all that its ranks recorded
    return analyze(paths, command, now())
