"""``ddpdoctor explain``: shows a rule's page in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli.options import LIST, Argument
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.report.lines import wrap

if TYPE_CHECKING:
    from ddpdoctor.diagnose.files import RulePage


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Explain a code or an error message: what it means and what to do.

    An error is recognized by its text. `ddpdoctor analyze` finds it in a log, and names the rank that failed first.
    """

    name: Annotated[
        str | None, Argument(metavar="CODE|TEXT", help="A code or kind (DD601, stuck), or an error message.")
    ] = None
    show_list: Annotated[bool, LIST.but(help="List all codes.")] = False


def run(options: Options) -> int:
    from ddpdoctor.cli.output import read_width, write
    from ddpdoctor.diagnose.files import LIST_HINT, find_error, read_page, read_pages

    if options.show_list:
        write(sys.stdout, render_list(read_pages()))
    elif options.name and (known := find_error(options.name)) is not None:
        write(sys.stdout, render_error(*known, read_width(sys.stdout)))
    elif options.name:
        write(sys.stdout, render_page(read_page(options.name)))
    else:
        raise UserError("no code was given", help=f"Give one, such as DD601; {LIST_HINT}")
    return ExitStatus.OK


def render_list(pages: tuple[RulePage, ...]) -> str:
    width = max((len(page.kind) for page in pages), default=0)
    return "".join(f"{page.code}  {page.kind:<{width}}  {page.severity:<7}  {page.summary}\n" for page in pages)


def render_error(title: str, texts: dict[str, str], width: int | None) -> str:
    """Render what a known error means, what is at fault, and what to do. If ``width`` is None, nothing is wrapped."""
    lines = [line for label, text in texts.items() for line in wrap(text, width, first=f"  {label:<10}")]
    return "\n".join([title, "", *lines]) + "\n"


def render_page(page: RulePage) -> str:
    title = f"{page.code} {page.kind} ({page.severity})"
    return f"{title}\n{'=' * len(title)}\n\n{page.text.strip()}\n"
