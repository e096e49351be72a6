"""The site, as a browser shows it: pages that fit from a phone to a large screen, and the reports of the gallery."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, started_browser
from tests.doc_pages import DOCS, load_script
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
    pages = [page for page in pages if "<article" in page.read_text() and page.parent.name != "gallery"]
    assert len(pages) > 60
    wrong = []
    for page in pages:
        browser.open(page)
        for width in WIDTHS:
            browser.resize(width)
            is_wide, is_shifted = browser.ask(TOO_WIDE)
            wrong += [(str(page.relative_to(site)), width, is_wide, is_shifted)] if is_wide or is_shifted else []
    assert wrong == []


def test_each_report_of_the_gallery_is_on_its_page_and_opens(site: Path, browser: Browser) -> None:
    marked = re.findall(r"^<!-- report: ([\w-]+) -->$", (DOCS / "gallery.md").read_text(), re.MULTILINE)
    reports = load_script("gallery").read_reports()
    assert len(marked) == 10
    assert marked == list(reports)
    browser.open(site / "gallery.html")
    links = [link.get_attribute("href") for link in browser.all(".live a") if link.text]
    assert links == [(site / "gallery" / f"{name}.html").as_uri() for name in marked]
    for name in marked:
        browser.open(site / "gallery" / f"{name}.html")
        assert browser.complaints() == []
        assert browser.one("h1").text
        assert browser.ask("return document.documentElement.scrollWidth <= innerWidth"), name
    verdicts = {name: report.verdict and report.verdict.kind for name, report in reports.items()}
    assert verdicts == {
        "hang": "stuck", "mismatch": "mismatch", "crash": "crash", "drift": "param-drift", "nan": "nonfinite-grad",
        "slow-rank": "straggler", "same-data": "duplicate-data", "healthy": None, "allreduce-bench": None,
        "check-env": "xid",
    }  # fmt: skip


@pytest.mark.parametrize(("width", "picture"), [(1280, "verdict.svg"), (400, "verdict-narrow.svg")])
def test_the_front_page_begins_with_a_picture_and_three_doors(
    site: Path, browser: Browser, width: int, picture: str
) -> None:
    browser.open(site / "index.html", width)
    shown = browser.ask("const i = document.querySelector('img.terminal'); return [i.currentSrc, i.naturalWidth > 0]")
    assert shown == [(site / "images" / picture).as_uri(), True]
    doors = [door.text.splitlines()[0] for door in browser.all("#ddpdoctor > ul > li")]
    assert doors == ["It hangs", "It is slow", "Start right"]
    assert browser.ask(
        "return [...document.querySelectorAll('#ddpdoctor > ul pre')].every(p => p.scrollWidth <= p.clientWidth)"
    )
