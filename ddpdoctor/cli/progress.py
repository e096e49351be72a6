"""A progress bar on stderr that shows the current measurement and the time left. It is shown only on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from typing_extensions import Self


class ShownProgress:
    """A context manager whose ``show`` updates the bar. Any thread may stop the bar before it prints a report."""

    def __init__(self, stream: TextIO, *, wanted: bool) -> None:
        """Take the stream. ``wanted`` is True on only one rank of a job."""
        self._bar = _make_bar(stream) if wanted and stream.isatty() else None
        self._task: Any = None

    def __enter__(self) -> Self:
        """Show nothing yet. The bar appears with the first ``show``, after the ranks have met."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self.stop()

    def show(self, what: str, share: float, left_s: float | None) -> None:
        """Show what is being measured, the share that is done (0 to 1), and the seconds left, if known."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=1.0, left="")
            self._bar.start()
        self._bar.update(self._task, description=what, completed=share, left=_describe_left(left_s), refresh=True)

    def stop(self) -> None:
        """Remove the bar permanently."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=stream)
    words, left = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[left]}", markup=False)
    # Draw only in show(), between measurements. A drawing thread would compete with them.
    return Progress(words, BarColumn(), left, console=console, transient=True, auto_refresh=False)


def _describe_left(left_s: float | None) -> str:
    if left_s is None:
        return ""
    minutes, seconds = divmod(max(0, round(left_s)), 60)
    return f"{minutes} min {seconds:02d} s left" if minutes else f"{seconds} s left"
