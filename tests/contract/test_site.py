"""The site, as a browser shows it: no page is wider than the window, from a phone to a large screen."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, started_browser
from tests.doc_pages import DOCS
from tests.needs import need_module

pytestmark = pytest.mark.full
WIDTHS = (400, 768, 1024, 1280, 1440, 1920)
TOO_WIDE = """
const root = document.documentElement;
const left = document.querySelector('article').getBoundingClientRect().left;
return [root.scrollWidth > root.clientWidth,
        [...document.querySelectorAll('article table')].some(t => t.getBoundingClientRect().left > left + 8)];
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_module("sphinx", extra="docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-b", "html", str(DOCS), str(folder)]
    subprocess.run(command, check=True, timeout=280)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as browser:
        yield browser


def test_each_page_fits_into_every_window_and_its_tables_begin_at_the_left(site: Path, browser: Browser) -> None:
    of_rules = sorted((site / "rules").glob("DD*.html"))[::20]
    pages = [*(page for page in sorted(site.rglob("*.html")) if page.parent.name != "rules"), *of_rules]
    pages = [page for page in pages if "<article" in page.read_text()]
    assert len(pages) > 60
    wrong = []
    for page in pages:
        browser.open(page)
        for width in WIDTHS:
            browser.resize(width)
            is_wide, is_shifted = browser.ask(TOO_WIDE)
            wrong += [(str(page.relative_to(site)), width, is_wide, is_shifted)] if is_wide or is_shifted else []
    assert wrong == []
