"""Sphinx builds the site from these pages: sphinx-build -W --keep-going -n -b html docs site.

The pages are plain Markdown, readable on GitHub, and hold no toctree. A page listed in ``INDEX_PAGES`` is an index: the
pages that it links to are its entries in the sidebar, under the heading above the link.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import gallery

from ddpdoctor import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "ddpdoctor"
author = "The ddpdoctor authors"
project_copyright = "The ddpdoctor authors"
release = version = __version__

extensions = ["myst_parser"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"ddpdoctor {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_search_summary = False  # a summary is fetched, which browsers refuse for pages opened from a disk
html_show_sphinx = False
html_copy_source = False

INDEX_PAGES = frozenset({"index", "first-job/index", "rules/index", "design/index"})
LINK = re.compile(r"\]\(([^)#:\s]+)\.md\)")
CARD = re.compile(r"^<!-- report: ([\w-]+) -->$", re.MULTILINE)


def add_toctrees(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append to an index page a hidden toctree for each of its sections that links to other pages."""
    if page in INDEX_PAGES or page.startswith("rules/family-"):
        source[0] += "".join(render_toctree(*section) for section in read_sections(source[0]) if section[1])


def add_reports(_app: Sphinx, page: str, source: list[str]) -> None:
    """Show each report of the gallery in the place of its mark, which GitHub leaves out."""
    if page == "gallery":
        source[0] = CARD.sub(lambda mark: gallery.show_card(mark[1]), source[0])


def write_files(app: Sphinx, error: Exception | None) -> None:
    """Write the pages of the reports, and the images that HTML in a page names."""
    if error is None and app.builder.format == "html":
        gallery.write_pages(Path(app.outdir, "gallery"))
        shutil.copytree(DOCS / "images", Path(app.outdir, "images"), dirs_exist_ok=True)


def read_sections(text: str) -> list[tuple[str, list[str]]]:
    """Return the heading of each section of level 2, and the pages that it links to, each once in the page.

    What stands before the first heading has the pages that no section links to.
    """
    seen: set[str] = set()
    sections = []
    first, *rest = re.split(r"^## ", "\n" + text, flags=re.MULTILINE)
    for part in (*rest, first):
        heading, _, body = part.partition("\n")
        pages = [page for page in dict.fromkeys(LINK.findall(body)) if is_below(page) and page not in seen]
        seen.update(pages)
        sections.append((heading, pages))
    return [sections[-1], *sections[:-1]]


def is_below(page: str) -> bool:
    """Tell whether a link leads to a page of this folder or one below it."""
    return ".." not in PurePosixPath(page).parts


def render_toctree(caption: str, pages: list[str]) -> str:
    """Return a hidden toctree in MyST's notation."""
    entries = "\n".join(pages)
    shown = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{shown}\n{entries}\n```\n"


def setup(app: Sphinx) -> None:
    """Tell Sphinx to call these functions for each page, and at the end."""
    app.connect("source-read", add_toctrees)
    app.connect("source-read", add_reports)
    app.connect("env-get-outdated", lambda *_: ["gallery"])  # its reports follow the program, not only its source
    app.connect("build-finished", write_files)
