"""Shows a text again and again: in place on a terminal, one block after the other in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from ddpdoctor.cli.output import write

if TYPE_CHECKING:
    from typing_extensions import Self


class LiveText:
    """A context manager whose ``show`` replaces the text on a terminal, and appends it elsewhere."""

    def __init__(self, stream: TextIO, *, in_place: bool) -> None:
        """Take the stream. Without ``in_place``, each text is appended on a terminal too, without an empty line."""
        self._stream, self._in_place = stream, in_place
        self._live = _make_live(stream) if in_place and stream.isatty() else None
        self._is_first = True

    def __enter__(self) -> Self:
        """Show nothing yet."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last text on the screen."""
        if self._live is not None:
            self._live.stop()

    def show(self, text: str) -> bool:
        """Show a text. Return False if nobody reads the stream any more."""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text.from_ansi(text.rstrip("\n")), refresh=True)
            return True
        gap = "" if self._is_first or not self._in_place else "\n"
        self._is_first = False
        return write(self._stream, gap + text)


def _make_live(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.live import Live

    # Drawn in show() only: a drawing thread would take time from the job.
    return Live(console=Console(file=stream, highlight=False), auto_refresh=False, vertical_overflow="crop")
