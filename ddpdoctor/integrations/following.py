"""What the callbacks of all frameworks have in common: watch from the start of training, and log what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.integrations.watch import Watch

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from ddpdoctor.integrations.watch import HangAction

TITLE = "ddpdoctor"
"""The name under which loggers get the report."""


class TrainingWatch:
    """A watch that begins anew with each training."""

    def __init__(
        self, entry: str, hang_timeout: float, on_hang: HangAction, report_dir: str | os.PathLike[str] | None
    ) -> None:
        """Take the name of the user's class, and what ``ddpdoctor.watch`` takes. Raises ``ValueError`` as it does."""
        self._watch = Watch(hang_timeout=hang_timeout, on_hang=on_hang, report_dir=report_dir)
        self._watch.entry = entry
        self._runs = False

    def begin(self) -> None:
        """Start to watch, unless training runs already."""
        if not self._runs:
            self._runs = True
            self._watch.start()

    def end(self, log: Callable[[str], None] | None, error: BaseException | None = None) -> None:
        """Stop, and give ``log`` the report if something was found. ``log`` is None on ranks that log nothing."""
        if not self._runs:
            return
        self._runs = False
        self._watch.leave(error)
        if log is not None and (text := self._watch.report()):
            log(text)
