"""Shows a page in the user's browser."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from ddpdoctor.model.errors import UserError

SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Without one of these variables, Python would start a browser of the terminal, or none."""


def make_page_file() -> Path:
    """Make a private temporary file for a page, which stays. Raises ``UserError``."""
    try:
        fd, name = tempfile.mkstemp(prefix="ddpdoctor-", suffix=".html")
    except OSError as error:
        raise UserError(
            f"no temporary file can be made: {error.strerror}", help="Give a file for the page: --output report.html."
        ) from error
    os.close(fd)
    return Path(name)


def open_page(path: Path) -> None:
    """Open a page in the browser. Say where it is, because there may be no browser on this machine."""
    import webbrowser

    from ddpdoctor.cli.output import say

    page = path.resolve()
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, SCREENS))
    if has_screen and webbrowser.open(page.as_uri()):
        say(sys.stderr, f"the page is {page}")
    else:
        say(sys.stderr, f"no browser could be opened here; the page is {page}")
