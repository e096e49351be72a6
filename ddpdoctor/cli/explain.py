"""``ddpdoctor explain``: a rule's page in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ddpdoctor.diagnose.catalogue import Page


def explain(
    name: Annotated[str | None, typer.Argument(metavar="CODE", help="A code or kind: DD601, stuck.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List all codes.")] = False,
) -> None:
    """Explain a finding: what it means, how it is told, what to do."""
    from ddpdoctor.cli.output import write
    from ddpdoctor.diagnose.catalogue import LIST_HINT, find_page, read_pages
    from ddpdoctor.model.errors import UserError

    if show_list:
        write(sys.stdout, render_list(read_pages()))
    elif name:
        write(sys.stdout, render_page(find_page(name, read_pages())))
    else:
        raise UserError("no code was given", help=f"Give one, such as DD601; {LIST_HINT}")


def render_list(pages: tuple[Page, ...]) -> str:
    """Render a line a rule: code, kind, severity, summary."""
    width = max((len(page.kind) for page in pages), default=0)
    return "".join(f"{page.code}  {page.kind:<{width}}  {page.severity:<7}  {page.summary}\n" for page in pages)


def render_page(page: Page) -> str:
    """Render a rule's page under a line that names it; it is Markdown, which reads well as it is."""
    title = f"{page.code} {page.kind} ({page.severity})"
    return f"{title}\n{'=' * len(title)}\n\n{page.text.strip()}\n"
