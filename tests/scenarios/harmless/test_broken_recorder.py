"""A recorder that fails, in any function of its own in turn, costs the record and nothing else; DD901 says so.

The faults are put into a copy of its files, which the process then loads as it would load the real ones.
"""

import ast
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.harmless.alone import RECORDER, defects, make_folder, read_rings, run_bare, run_recorded

SCRIPT = (str(Path(__file__).with_name("scripts.py")), "lists_threads")
TRAINS = Path(__file__).parent / "trains.py"
AT_START = ("start", "storage/ring_writing", "hooks", "state", "frames", "wrappers", "errors", "sampler")
"""The files that a rank loads before its script begins."""
WALLS = frozenset({"Recorder.failed", "guarded", "wraps", "apply", "pass_on", "came_from_outside"})
"""What stands between a failure and the script. There must be something that does not fail."""
BREAKS = "\n\ndef _broken(*args, **kwargs):\n    raise {error}('broken on purpose')\n\n\n{name} = {value}\n"
MOST_HOOKS = 60
"""More functions than these are called while a rank trains: the script reaches them."""
ERRORS = ("OSError", "ValueError", "MemoryError", "KeyError")


def functions(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each function and method of a file by its name, and what is put in its place, behind the same wall."""
    for node in ast.parse(file.read_text()).body:
        members = [("", node)] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef):
            members = [(f"{node.name}.", member) for member in node.body if isinstance(member, ast.FunctionDef)]
        for owner, member in members:
            decorators = [ast.unparse(decorator) for decorator in member.decorator_list]
            if f"{owner}{member.name}" not in WALLS and "property" not in decorators:
                yield f"{owner}{member.name}", "".join(f"{d}(" for d in decorators) + "_broken" + ")" * len(decorators)


def broken_copy(folder: Path, part: str, name: str, value: str, error: str) -> Path:
    """Return a copy of the recorder in which one function raises."""
    copy = folder / "recorder"
    shutil.copytree(RECORDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / f"{part}.py").open("a") as file:
        file.write(BREAKS.format(error=error, name=name, value=value))
    return copy


@pytest.mark.parametrize(
    "part", [*AT_START[:3], *(pytest.param(part, marks=pytest.mark.nightly) for part in AT_START[3:])]
)
def test_a_script_that_never_imports_torch_runs_whatever_fails(part: str, tmp_path: Path) -> None:
    bare = run_bare(*SCRIPT)
    for number, (name, value) in enumerate(functions(RECORDER / f"{part}.py")):
        work = tmp_path / str(number)
        folder = make_folder(work / "run")
        error = ERRORS[number % len(ERRORS)]
        copy = broken_copy(work, part, name, value, error)
        recorded = run_recorded(folder, *SCRIPT, recorder=copy)
        assert recorded == bare, f"{part}.{name}"


def test_a_recorder_that_cannot_start_says_so(tmp_path: Path) -> None:
    for number, (part, name) in enumerate(
        (("start", "install"), ("storage/ring_writing", "Ring.__init__"), ("errors", "install"))
    ):
        work = tmp_path / str(number)
        folder = make_folder(work / "run")
        copy = broken_copy(work, part, name, "_broken", "OSError")
        run_recorded(folder, "-c", "pass", recorder=copy)
        assert "broken on purpose" in "".join(defects(folder)), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_training_runs_whatever_fails(every: int, tmp_path: Path) -> None:
    """Break functions of the recorder in turn, in one process that trains once more for each."""
    folder = make_folder(tmp_path / "run")
    done = run_recorded(folder, str(TRAINS), str(every), OMP_NUM_THREADS="1")
    assert done.status == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert lines[-1] == "done"
    assert [line for line in lines if line.startswith("HARMED")] == []
    called = [line.split()[1:] for line in lines if line.startswith("called ")]
    assert len(called) > MOST_HOOKS / every
    assert [name for name, failures in called if failures == "0"] == []
    assert "broken on purpose" in "".join(defects(folder))


# Scripts run as they would without the recorder: to the byte, and the status.


SCRIPTS = Path(__file__).with_name("scripts.py")
ALONE = "interrupted_anywhere"
AS_ROOT = frozenset({"changes_user", "changes_root"})
_CHANGES = re.compile(rb"0x[0-9a-f]+|\bpid=\d+")


@pytest.mark.parametrize("name", [ALONE, *re.findall(r"^def ([a-z]\w+)", SCRIPTS.read_text(), re.MULTILINE)])
def test_a_script_runs_as_without_the_recorder(name: str, tmp_path: Path) -> None:
    if name in AS_ROOT and os.geteuid():
        pytest.skip("only root may")
    script = [str(SCRIPTS.with_stem(name))] if name == ALONE else [str(SCRIPTS), name]
    for place in ("bare", "recorded"):
        (tmp_path / place).mkdir()
    folder = make_folder(tmp_path / "run")
    bare = run_bare(*script, WORK=str(tmp_path / "bare"))
    recorded = run_recorded(folder, *script, WORK=str(tmp_path / "recorded"))
    assert recorded.status == bare.status
    assert _CHANGES.sub(b"", recorded.stderr) == _CHANGES.sub(b"", bare.stderr)
    assert recorded.stdout == bare.stdout
    assert bare.stdout, "the script says how it went"
    assert len(read_rings(folder)) == 1
    assert defects(folder) == []
