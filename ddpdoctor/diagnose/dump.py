"""Takes evidence of a job that goes on, and judges it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.live import is_watched, read_live
from ddpdoctor.diagnose.build import running_report
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.model.findings import Report

    Ask = Callable[[Path, float, Callable[[], bool]], bool]
    """Asks the watcher that records in a folder for evidence, with a time limit, as long as it runs."""

LIMIT_S = 20.0
"""Our choice: ranks answer within three seconds, and other nodes within five."""
PATIENCE_S = 10.0
"""Our choice: who asks suspects a hang, so a rank without progress is blamed sooner than by a watcher that may stop the
job."""


def take_dump(run_dir: Path, ask: Ask) -> Report:
    """Take evidence of the job in a run folder, and return its report. Raises ``UserError`` if none can be taken."""
    live = read_live(run_dir)
    if live.is_running is None:
        raise UserError(
            f"the job was started on {live.run.host}, and its `wrap` cannot be asked from here",
            help=f"Type the command on {live.run.host}.",
        )
    if not live.is_running:
        raise _ended(run_dir)
    is_running = partial(is_watched, live.run)
    try:
        came = ask(live.folder, LIMIT_S, is_running)
    except OSError as error:
        raise UserError(f"the `wrap` of {run_dir} cannot be asked: {error.strerror}") from error
    if not came and not is_running():
        raise _ended(run_dir)
    if not came:
        raise UserError(
            f"the `wrap` of {run_dir} did not answer within {LIMIT_S:.0f} s",
            help="It may be stopped, or of an older version. `ddpdoctor attach` looks at the ranks without it.",
            status=ExitStatus.INCONCLUSIVE,
        )
    return running_report(live.folder, PATIENCE_S)


def _ended(run_dir: Path) -> UserError:
    return UserError(f"the job in {run_dir} has ended", help=f"`ddpdoctor report {run_dir}` shows what came of it.")
