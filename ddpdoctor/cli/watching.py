"""The process that watches ranks which called ``ddpdoctor.watch``: ``python -m ddpdoctor.cli.watching``.

``ddpdoctor.integrations.place`` starts it, one for each host and launch. It is no verb: nobody types it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ddpdoctor.launch.session import JoinedSession, Joining, joined_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.launch.command_line import OnHang
    from ddpdoctor.launch.session import JobOutcome

GOES_ON = {
    "report": 'the job goes on and is watched (on_hang="kill" stops it here)',
    "kill": "the job goes on and is watched: it is not certain that it hangs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The command line of this process."""

    hang_timeout_s: float
    on_hang: OnHang
    entry: str
    """What started the watch, as ``Run.entry``."""
    run_dir: Path
    record: Path
    meeting: Path | None
    command: tuple[str, ...]
    """The command of the first rank."""


def read_words(words: Sequence[str]) -> Words:
    """Read the command line, which ``ddpdoctor.integrations.place`` has written. An empty meeting means none."""
    hang_timeout, on_hang, entry, run_dir, record, meeting, *command = words
    return Words(
        hang_timeout_s=float(hang_timeout),
        on_hang=cast("OnHang", on_hang),
        entry=entry,
        run_dir=Path(run_dir),
        record=Path(record),
        meeting=Path(meeting) if meeting else None,
        command=tuple(command),
    )


def watch(words: Words) -> None:
    """Watch until the last rank has left, and report on stderr what is wrong."""
    from ddpdoctor.cli.running import finish, load_judge, make_notifier, outcome_report

    options = joined_options(words.run_dir, words.hang_timeout_s, words.on_hang, words.entry, words.command)
    notifier = make_notifier(options, outcome_report, GOES_ON[words.on_hang])
    joining = Joining(record=words.record, meeting=words.meeting)
    session = JoinedSession(options, load_judge, notifier, joining)
    finish(session.run(), notifier, is_shown=lambda outcome: _is_news(session, outcome))


def _is_news(session: JoinedSession, outcome: JobOutcome) -> bool:
    """Return whether the end has to be shown: a healthy job is silent, and what was shown already is not repeated."""
    from ddpdoctor.model.findings import Severity

    if outcome.end.interrupted or session.is_known(outcome.judgment):
        return False
    return any(finding.severity is not Severity.INFO for finding in outcome.judgment.findings)


def main() -> None:
    """Watch. An error is shown as the command line shows it, and the job does not notice."""
    from ddpdoctor.cli.output import show_defect, show_error
    from ddpdoctor.model.errors import UserError

    try:
        watch(read_words(sys.argv[1:]))
    except UserError as error:
        show_error(error)
    except Exception as error:  # noqa: BLE001 - the outermost wall: no traceback ever reaches the job's stderr
        show_defect(error)


if __name__ == "__main__":
    main()
