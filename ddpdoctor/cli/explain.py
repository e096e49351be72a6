"""``ddpdoctor explain``: a rule's page in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ddpdoctor.diagnose.catalogue import ErrorPage, Page


def explain(
    name: Annotated[
        str | None, typer.Argument(metavar="CODE|TEXT", help="A code or kind (DD601, stuck), or the text of an error.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List all codes.")] = False,
) -> None:
    """Explain a finding, or an error of torch: what it means and what to do."""
    from ddpdoctor.cli.output import read_width, write
    from ddpdoctor.diagnose.catalogue import LIST_HINT, find_error, find_page, read_pages
    from ddpdoctor.model.errors import UserError

    if show_list:
        write(sys.stdout, render_list(read_pages()))
    elif name and (known := find_error(name)) is not None:
        write(sys.stdout, render_error(known, read_width(sys.stdout)))
    elif name:
        write(sys.stdout, render_page(find_page(name, read_pages())))
    else:
        raise UserError("no code was given", help=f"Give one, such as DD601; {LIST_HINT}")


def render_list(pages: tuple[Page, ...]) -> str:
    """Render a line a rule: code, kind, severity, summary."""
    width = max((len(page.kind) for page in pages), default=0)
    return "".join(f"{page.code}  {page.kind:<{width}}  {page.severity:<7}  {page.summary}\n" for page in pages)


def render_error(known: ErrorPage, width: int | None) -> str:
    """Render what a known error means, who is at fault, and what to do; ``width`` None wraps nothing."""
    from ddpdoctor.report.lines import wrap

    lines = [line for label, text in known.told.items() for line in wrap(text, width, first=f"  {label:<10}")]
    return "\n".join([known.title, "", *lines]) + "\n"


def render_page(page: Page) -> str:
    """Render a rule's page under a line that names it; it is Markdown, which reads well as it is."""
    title = f"{page.code} {page.kind} ({page.severity})"
    return f"{title}\n{'=' * len(title)}\n\n{page.text.strip()}\n"
