"""Each hook of the recorder finds its place in the installed torch; without one the others go on, and DD901 says so."""

from pathlib import Path

import pytest

from ddpdoctor.recorder.storage import ring_reading
from ddpdoctor.rules.progress.recording import read_losses
from tests.scenarios.running import PATIENT, check_finished, run

STRIPPED = ("torch.multiprocessing.spawn", "_wrap")
"""Torch itself needs it for ``mp.spawn`` only."""


def hooks_of(folder: Path) -> tuple[set[str], set[str]]:
    """Return the hooks that ranks have put in, and those that their torch has no place for."""
    found: set[str] = set()
    lacks: set[str] = set()
    for path in (folder / "rings").iterdir():
        for note in ring_reading.read_ring_file(path).notes:
            found.update(note["found"] if note["k"] == "hooks" else ())
            lacks.update(note["lacks"] if note["k"] == "hooks" else ())
    return found, lacks


@pytest.mark.usefixtures("preloaded_python")
def test_every_hook_is_found_and_what_it_reports_is_written_down(tmp_path: Path) -> None:
    ran = run("every_hook", tmp_path, *PATIENT, ranks=2)
    check_finished(ran)
    assert {finding["kind"] for finding in ran.report["findings"]} <= {"exit-abort"}, ran.stderr
    found, lacks = hooks_of(tmp_path)
    of_agent = {hook for hook in read_losses("hooks") if "Context" in hook or "ElasticAgent" in hook}
    modules = {hook for hook in read_losses("hooks") if hook.startswith("torch.")}
    assert (lacks, read_losses("hooks").keys() - of_agent - modules - found) == (set(), set())


def test_a_hook_that_this_torch_lacks_is_reported_once(tmp_path: Path) -> None:
    ran = run("every_hook", tmp_path, "--debug-level", "OFF", *PATIENT, ranks=2, args=STRIPPED)
    check_finished(ran)
    assert ran.report["verdict"] is None, ran.stderr
    (finding,) = [one for one in ran.report["findings"] if one["kind"] != "exit-abort"]
    assert (finding["code"], finding["ranks"]) == ("DD901", [0, 1])
    assert "this torch has no spawn._wrap, so errors of ranks" in finding["summary"]
    found, lacks = hooks_of(tmp_path)
    assert "DistributedDataParallel.forward" in found
    assert lacks == {"spawn._wrap"}
