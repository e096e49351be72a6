"""A page of plain lines whose first characters may have a style. Only this module uses Rich for drawing."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ddpdoctor.report.blocks import Tone
from ddpdoctor.report.lines import clean, wrap

if TYPE_CHECKING:
    from pathlib import Path

STYLES = {
    Tone.PLAIN: "",
    Tone.STRONG: "bold",
    Tone.GOOD: "green",
    Tone.NOTE: "cyan",
    Tone.WARNING: "bold yellow",
    Tone.ERROR: "bold red",
    Tone.SKIPPED: "dim",
    Tone.CRASHED: "bold magenta",
}


@dataclass(kw_only=True)
class TextPage:
    """The lines so far. Each is plain text with one style for its first characters."""

    width: int | None
    cwd: Path | None
    lines: list[Text] = field(default_factory=list)

    def add(
        self, text: str, *, first: str = "", tone: Tone = Tone.PLAIN, styled: int | None = None, whole: bool = False
    ) -> None:
        """Add a paragraph, wrapped unless ``whole``. ``tone`` applies to the first ``styled`` characters, or to all."""
        for number, line in enumerate(wrap(self.clean(text), None if whole else self.width, first=first)):
            drawn = Text(line)
            if tone is not Tone.PLAIN and (styled is None or number == 0):
                drawn.stylize(STYLES[tone], 0, styled)
            self.lines.append(drawn)

    def gap(self) -> None:
        """Add an empty line, unless the page is empty."""
        if self.lines:
            self.lines.append(Text())

    def clean(self, text: str) -> str:
        """Make collected text safe to print, with paths relative to this page's ``cwd``."""
        return clean(text, self.cwd)


def width_of(text: str) -> int:
    """Return the width of a text in terminal columns."""
    return cell_len(text)


def draw(page: TextPage, *, color: bool) -> str:
    """Let Rich add only colors: no wrapping, no markup, no highlighting."""
    console = Console(
        file=io.StringIO(),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as drawn:
        for line in page.lines:
            console.print(line, soft_wrap=True)
    return drawn.get()
