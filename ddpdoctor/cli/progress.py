"""A bar on stderr that says what is measured and how long it takes yet; nothing at all where that is no terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from typing_extensions import Self


class ShownProgress:
    """A context in which ``show`` moves the bar. Threads may stop it: whoever reports has the terminal to itself."""

    def __init__(self, stream: TextIO, *, wanted: bool) -> None:
        """Take the stream; ``wanted`` is for one rank of a job only."""
        self._bar = _make_bar(stream) if wanted and stream.isatty() else None
        self._task: Any = None

    def __enter__(self) -> Self:
        """Show nothing yet: a bar that stands still before the ranks have met says nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self.stop()

    def show(self, what: str, share: float, left_s: float | None) -> None:
        """Say what is measured, which share of all is done, 0 to 1, and how long it takes yet, where that is known."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=1.0, left="")
            self._bar.start()
        self._bar.update(self._task, description=what, completed=share, left=_describe_left(left_s), refresh=True)

    def stop(self) -> None:
        """Take the bar away, for good."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=stream)
    words, left = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[left]}", markup=False)
    # Drawn in calls of show(), between measurements: a thread that draws would take turns with them.
    return Progress(words, BarColumn(), left, console=console, transient=True, auto_refresh=False)


def _describe_left(left_s: float | None) -> str:
    if left_s is None:
        return ""
    minutes, seconds = divmod(max(0, round(left_s)), 60)
    return f"{minutes} min {seconds:02d} s left" if minutes else f"{seconds} s left"
