"""Each fault of the demo is found by the demo itself, on real ranks."""

from pathlib import Path

import pytest

from ddpdoctor.cli.demo import FAULTS
from tests import doc_pages
from tests.scenarios.running import doctor

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.mark.parametrize("fault", [*FAULTS[:2], *(pytest.param(one, marks=pytest.mark.nightly) for one in FAULTS[2:])])
def test_the_demo_finds_its_fault(fault: str, tmp_path: Path) -> None:
    done = doctor("demo", fault, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f" {fault}, rank" in done.stderr
    assert "torch/distributed/elastic" not in done.stderr
    assert ("time of a step: " in done.stderr) is (fault == "input-bound")
    command = "ddpdoctor demo" if fault == FAULTS[0] else f"ddpdoctor demo {fault}"
    shown = [block for block in doc_pages.blocks() if block.commands == (command,)]
    assert [(block.page.name, doc_pages.differs(block.shown, done.stderr)) for block in shown] == [
        (block.page.name, "") for block in shown
    ]
