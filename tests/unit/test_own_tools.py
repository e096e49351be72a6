"""What the tests themselves stand on: fuzzing, mutations, jobs on GPUs and preloaded Pythons."""

import ast
import collections
import contextlib
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.mutations import changes, nearest
from tests.fuzz_samples import make_benches, make_checkpoints, make_runs
from tests.fuzzing import Sample, check_output, fuzz, peak_mib
from tests.golden import Cases, words
from tests.gpu.catalog import JOBS, ONLY_A_DEVICE
from tests.gpu.running import GRACE_S, ROOT, Job, Runner
from tests.gpu.running import JOBS as SCRIPTS
from tests.gpu.saving import Results
from tests.preloaded import can_fork, preloaded
from tests.scenarios.running import pids_with

SLEEP = "import time; time.sleep(60)"
HOLD = """
import os, pathlib, time
pathlib.Path("new").write_text(str(os.getpid()))
pathlib.Path("new").rename("held")
time.sleep(60)
"""


def run(folder, *jobs, limit_s=60.0, **more):
    results = Results(folder / "results", {"machine": "this"})
    runner = Runner(jobs, folder / "jobs", width=2, limit_s=limit_s, ended=results.job_ended, dry=True, **more)
    return results, [runner(job.name) for job in jobs]


def test_what_jobs_leave_is_read_and_saved_at_once_in_one_archive(tmp_path):
    script = "import json, sys; print('said'); json.dump(dict(backend=sys.argv[1]), open(sys.argv[2], 'w'))"
    jobs = [Job(name=name, command=("-c", script, "{backend}", "{folder}/result.json")) for name in ("one", "two")]
    results, (done, _) = run(tmp_path, *jobs)
    assert (done.status, done.problem, done.stdout, done.result) == (0, "", "said\n", {"backend": "gloo"})
    entries = json.loads((results.folder / "index.json").read_text())["jobs"]
    assert sorted(entry["name"] for entry in entries) == ["one", "two"]
    assert all((entry["status"], entry["result"]) == (0, {"backend": "gloo"}) for entry in entries)
    assert "| one | 0 |" in (results.folder / "summary.md").read_text()
    with tarfile.open(results.folder / "runs-1.tar.gz", ignore_zeros=True) as archive:
        assert {"one/stdout", "two/stdout"} <= set(archive.getnames())


STARTS = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True).wait()"
ENDS = {
    "past its limit": (Job(name="long", command=("-c", STARTS), limit_s=1.0), {}, None, "stopped at its limit of 1 s"),
    "held, and sent its signal": (Job(name="held", command=("-c", HOLD), sends=signal.SIGKILL), {}, -9, ""),
    "no time is left": (Job(name="late", command=("-c", SLEEP)), {"limit_s": 5.0}, None, "not reached"),
    "the end of all time is no failure of its own": (
        Job(name="last", command=("-c", SLEEP)), {"limit_s": GRACE_S + 1, "least_s": 0.0}, None, "cut off"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_a_job_that_is_stopped_says_why_and_the_rest_of_it_is_killed(case, tmp_path):
    job, limits, status, problem = ENDS[case]
    _, (done,) = run(tmp_path, job, **limits)
    assert (done.status, done.problem) == (status, problem)
    assert pids_with(f"GPU_TESTS_JOB={done.folder}") == []


def test_a_job_that_measures_time_runs_by_itself(tmp_path):
    script = "import time; time.sleep(1)"
    alone = Job(name="alone", command=("-c", "pass"), alone=True)
    _, (last, *others) = run(tmp_path, alone, *(Job(name=name, command=("-c", script)) for name in ("one", "two")))
    assert all(last.began_s >= other.began_s + other.took_s - 0.1 for other in others)


def test_a_runner_that_is_closed_begins_nothing_more(tmp_path):
    jobs = [Job(name=str(number), command=("-c", SLEEP)) for number in range(3)]
    ended = []
    runner = Runner(jobs, tmp_path, width=1, limit_s=300, ended=ended.append, dry=True)
    runner._begin()
    while not runner._running:
        time.sleep(0.01)
    runner.close()
    assert [runner(job.name).problem for job in jobs[1:]] == ["not reached"] * 2


def test_each_script_of_a_job_is_there():
    named = {word for job in JOBS.values() for word in job.command if word.endswith(".py")}
    assert named == {str(path) for path in SCRIPTS.glob("*.py") if path.name != "place.py"}


def looked_at(package):
    """Return the jobs that the tests of a package look at."""
    files = (ROOT / "tests" / package).glob("test_*.py")
    found = [one for path in files for one in vars(importlib.import_module(f"tests.{package}.{path.stem}")).values()]
    marks = [mark for test in found for mark in getattr(test, "pytestmark", ()) if hasattr(mark, "args")]
    rows = [row for mark in marks if mark.name == "parametrize" for row in mark.args[1]]
    marks += [mark for row in rows for mark in getattr(row, "marks", ())]
    return {name for mark in marks if mark.name == "gpu_job" for name in mark.args}


def test_each_job_is_looked_at_by_a_test():
    assert JOBS.keys() - looked_at("gpu") == set()


def test_what_only_a_device_shows_is_what_the_stand_in_cannot_run(tmp_path):
    only = {name for names in ONLY_A_DEVICE.values() for name in names}
    assert JOBS.keys() - looked_at("standin") == only
    Results(tmp_path, {})
    assert "- CUDA graphs: capture_async_allreduce, " in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_imports_of_ours_is_there(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and "ddpdoctor" in node.module:
            source = node.module.replace("_ddpdoctor_recorder", "ddpdoctor.recorder")
            assert [alias.name for alias in node.names if not _is_there(source, alias.name)] == []


def _is_there(module, name):
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


# Some hundreds of damaged files, always the same: `tests/bench/fuzz.py` tries as many as wanted.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("numbers", [range(4), pytest.param(range(4, 75), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("make", [make_runs, make_benches, make_checkpoints])
def test_damaged_files_end_in_no_traceback_no_hang_and_no_escape(
    make: Callable[[Path], list[Sample]], numbers: range, tmp_path: Path
) -> None:
    assert list(fuzz(make(tmp_path), "kept", numbers)) == []


test_words = words(__name__, check_output=lambda row: [one.partition(":")[0] for one in check_output(*row)])


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x05]r\xff\xff\xff\x7f.",  # a memo of two billion values
        b"\x80\x05\x96" + struct.pack("<Q", 2**34) + b".",  # a bytearray of 16 GiB
        b"\x80\x05\x8e" + struct.pack("<Q", 2**34) + b".",  # bytes of as much
        b"\x80\x05\x8d" + struct.pack("<Q", 2**62) + b".",
    ],
)
def test_a_pickle_takes_no_memory_for_what_it_only_announces(opcodes: bytes, tmp_path: Path) -> None:
    from ddpdoctor.probes.checkpoint_formats import Unreadable, read_pickle

    path, before_mib = tmp_path / "sparse.pkl", peak_mib()
    with path.open("wb") as file:
        file.write(opcodes)
        file.truncate(2**35)
    with path.open("rb") as file, contextlib.suppress(Unreadable):
        read_pickle(file)
    assert peak_mib() - before_mib < 200


SOURCE = '''"""A module."""

LIMIT = 30


def decide(values: list[3], limit=None):
    """Say what."""
    found = [value for value in values if value]  # ü: places count bytes
    if found and limit:
        raise ValueError(f"{found[7]}")
    return "é", len(found) <= LIMIT
'''
CASES = Cases(__name__)
test_kept = CASES.test()


@CASES
def each_kind_of_change_in_its_place():
    """Each parses, and differs from the others. Texts, annotations and parts of f-strings stay."""
    found = list(changes(SOURCE))
    trees = {ast.dump(ast.parse(source)) for source in (SOURCE, *(one.source for one in found))}
    assert len(trees) == len(found) + 1
    lines = SOURCE.splitlines()
    return {one.what: [line for line in one.source.splitlines() if line not in lines] for one in found}


def test_the_nearest_tests_are_listed_as_they_stand_in_the_copy(tmp_path):
    for name in ("tests/rules/speed/test_here.py", "tests/unit/launch/test_there.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
        file = Path("ddpdoctor", *Path(name).parts[-3:-1] if "rules" in name else ["launch"], "module.py")
        assert nearest(tmp_path, file, collections.defaultdict(set)) == [name]


# A forked Python ends as a new one: with the same status, words and order of what is let go.


LET_GO = """
import atexit, weakref
class Held:
    def __del__(self): print("let go")
held = Held()
weakref.finalize(held, print, "finalized")
atexit.register(print, "bye")
"""
PROGRAMS = {
    "ends": "print('x')",
    "has a status": "import sys; print('x'); sys.exit(263)",
    "exits with words": "import sys; sys.exit('no')",
    "raises": "raise ValueError(3)",
    "is interrupted": "raise KeyboardInterrupt",
    "lets go": LET_GO,
    "closes its output": "import sys; print('x'); sys.stdout.close()",
    "has a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
}


def end(program: Path, stdout: int, *, forked: bool) -> tuple[int, str | None, str]:
    command = [sys.executable, str(program)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["OMP_NUM_THREADS"] = "1"  # as in the server: torch reads it once
    assert can_fork(command, environment) is forked
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_forked_python_ends_as_a_new_one(what: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[what])
    cold = end(program, subprocess.PIPE, forked=False)
    with preloaded():
        assert end(program, subprocess.PIPE, forked=True) == cold


def test_its_status_says_that_output_was_lost(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('x')")
    with Path("/dev/full").open("w") as full:
        cold = end(program, full.fileno(), forked=False)
        with preloaded():
            forked = end(program, full.fileno(), forked=True)
    assert (forked[0], cold[0]) == (120, 120)


@pytest.mark.parametrize("level", ["INFO", "FATAL"])
def test_torch_logs_what_the_variable_says(level: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from torch.distributed import TCPStore; TCPStore('127.0.0.1', 0, 1, True)")
    with preloaded():
        command = [sys.executable, str(program)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": level}
        assert can_fork(command, environment)
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ("[c10d]" in done.stderr) is (level == "INFO"), done.stderr
