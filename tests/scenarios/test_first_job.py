"""The pages of the first job, followed word for word: real jobs print what the pages show, and find the mistakes."""

import re
import textwrap
from pathlib import Path

import pytest

from tests import doc_pages, doc_runs

PAGES = sorted(doc_runs.FIRST_JOB.glob("[1-9]*.md"))
ABORT = "terminate called without an active exception"
"""What torch may do to a job on Gloo after its last line (pytorch issue 190489). Then the page is followed again."""
TRIES = 5
EXCERPT = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    printed: dict[str, str] = {}
    for number in range(TRIES):
        (tmp_path / str(number)).mkdir()
        printed = doc_runs.print_first_job(page, tmp_path / str(number))
        if not any(ABORT in text for text in printed.values()):
            break
    shown = {block.name: block.shown for block in doc_pages.blocks() if block.page == page and block.name in printed}
    assert shown
    wrong = {name: doc_pages.differs(text, printed[name]) for name, text in shown.items()}
    assert {name: line for name, line in wrong.items() if line} == {}, printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_lines_of_its_script(page: Path) -> None:
    script = doc_runs.FIRST_JOB / f"train{page.name[0]}.py"
    excerpts = EXCERPT.findall(page.read_text())
    assert bool(excerpts) == script.exists()
    code = textwrap.dedent(script.read_text()) if excerpts else ""
    assert [excerpt for excerpt in excerpts if excerpt not in code] == []
