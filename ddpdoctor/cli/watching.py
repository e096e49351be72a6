"""Watches ranks that called ``ddpdoctor.watch``. ``integrations.place`` starts it, once for a host and launch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ddpdoctor.launch.command_line import SplitCommand
from ddpdoctor.launch.placement import Placement, Style, WrapOptions
from ddpdoctor.launch.run_folder import REPORT_NAME
from ddpdoctor.launch.session import JoinedSession
from ddpdoctor.model.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.launch.command_line import OnHang

GOES_ON = {
    "report": 'the job continues and is watched (on_hang="kill" stops it here)',
    "kill": "the job continues and is watched: it may not be hung",
}


def watch(words: Sequence[str]) -> None:
    """Watch until the last rank has ended, and report what is wrong. ``integrations.place`` wrote ``words``."""
    from ddpdoctor.cli.running import JobReports, finish, load_judge, outcome_report

    hang_timeout, on_hang, entry, run_dir, record, meeting, *command = words
    options = WrapOptions(
        split=SplitCommand(script=command[0] if command else "", is_command=True), hang_timeout_s=float(hang_timeout),
        on_hang=cast("OnHang", on_hang), report_dir=Path(run_dir), report_file=Path(run_dir) / REPORT_NAME,
        placement=Placement(style=Style.COMMAND), command=tuple(command), entry=entry,
    )  # fmt: skip
    reports = JobReports(options=options, make=outcome_report, goes_on=GOES_ON[options.on_hang])
    session = JoinedSession(options, load_judge, reports, Path(record), Path(meeting) if meeting else None)
    outcome = session.run()
    # A healthy job is silent, and what was shown already is not repeated.
    is_silent = outcome.end.interrupted or session.is_known(outcome.judgment)
    has_news = not is_silent and any(finding.severity is not Severity.INFO for finding in outcome.judgment.findings)
    finish(outcome, reports, is_shown=lambda _: has_news)


def main() -> None:
    """Watch. Errors are shown as on the command line, and do not affect the job."""
    from ddpdoctor.cli.output import show_defect, show_error
    from ddpdoctor.model.errors import UserError

    try:
        watch(sys.argv[1:])
    except UserError as error:
        show_error(error)
    except Exception as error:  # noqa: BLE001 - the outermost wall: no traceback ever reaches the job's stderr
        show_defect(error)


if __name__ == "__main__":
    main()
