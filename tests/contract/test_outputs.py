"""Outputs that cannot be written are refused by every verb before anything is measured or started."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.cli.options import METRICS, REPORT, VERBS, Declared, declared_by, load_verb
from tests import forking
from tests.scenarios.running import clean_environment

ROOT = Path(__file__).parents[2]
LINES = {
    "wrap": [("probe.py",)],
    "tune": [("probe.py",)],
    "report": [("run",)],
    "bundle": [("run", "--yes")],
    "check-env": [("shm",), ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--timeout", "1h")],
    "check-rendezvous": [("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--timeout", "1h")],
    "allreduce-bench": [("--nproc-per-node", "2"), ("--nproc-per-node", "1")],
    "check-consistency": [("--model", "probe:make"), ("--diff", "probe.py", "probe.py")],
    "check-data": [("--samples", "9", "--world-size", "2"), ("--dataset", "probe:make", "--world-size", "2")],
    "check-checkpoint": [("probe.py",)],
    "analyze": [("probe.py",)],
    "attach": [("--pid", "1")],
}
"""Command lines that would leave a file "started", say something on stdout, or wait for an hour, were they run."""
UNUSABLE = {
    "file/below": "Not a directory",
    "readonly/new": "Read-only file system",
    "full/new": "No space left on device",
}
FILES_ONLY = {"missing/new": "No such file or directory", ".": "Is a directory"}
REASONS = {"a file": "File exists", **UNUSABLE, **FILES_ONLY}


def outputs_of(verb: str) -> list[Declared]:
    """Return the options that name what a verb writes."""
    declared = declared_by(load_verb(verb).Options)
    return [one for one in declared if one.type is Path and getattr(one.option, "panel", "") in {METRICS, REPORT}]


def cases() -> list[Any]:
    """Return each output of each verb in each unusable place; of a verb's further command lines one place is enough."""
    found = []
    outputs = [(verb, one) for verb in VERBS for one in outputs_of(verb)]
    for verb, one in outputs:
        is_folder = one.names[0] == "--report-dir"
        places = ["a file", *UNUSABLE] if is_folder else [*UNUSABLE, *FILES_ONLY]
        for number, line in enumerate(LINES[verb]):
            for place in places if number == 0 else places[1:2]:
                name = f"{verb} {' '.join(line)} {one.names[0]} {place}"
                found.append(pytest.param(verb, line, one.names[0], place, id=name))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the command lines name, a full file system and a read-only one where root may mount them."""
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "probe.py").write_text("open('started', 'w')\n")
    (folder / "file").write_text("")
    (folder / "a file").write_text("")
    mounted = [name for name, options in (("full", "size=4k"), ("readonly", "ro")) if mount(folder / name, options)]
    if "full" in mounted:
        (folder / "full" / "filling").write_bytes(b"x" * 4096)
    yield folder
    for name in mounted:
        subprocess.run(["umount", "-l", str(folder / name)], check=False, timeout=20)


def mount(place: Path, options: str) -> bool:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0


@pytest.fixture
def run(folder: Path) -> Callable[..., Any]:
    return lambda *words: forking.run(
        "-m", "ddpdoctor", *words, cwd=folder, env=clean_environment(PYTHONPATH=f"{ROOT}:{folder}")
    )


def test_every_verb_that_writes_has_a_command_line_here() -> None:
    assert {verb for verb in VERBS if outputs_of(verb)} == set(LINES)


@pytest.mark.parametrize(("verb", "line", "option", "place"), cases())
def test_an_output_that_cannot_be_written_is_refused_before_anything_else(
    folder: Path, run: Callable[..., Any], verb: str, line: tuple[str, ...], option: str, place: str
) -> None:
    mounted = place.partition("/")[0]
    if mounted in {"full", "readonly"} and not os.path.ismount(folder / mounted):
        pytest.skip("only root may mount a file system")
    named = f"{place}.svg" if option == "--plot" and place != "." else place
    before = sorted(folder.rglob("*"))
    done = run(verb, option, named, *line)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("ddpdoctor: error:") == len(done.stderr.strip().splitlines()) - 1 == 1, done.stderr
    assert place in done.stderr
    assert REASONS[place] in done.stderr or (option == "--plot" and place == ".")
    assert sorted(folder.rglob("*")) == before
