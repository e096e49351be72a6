"""The command as a whole: what a job writes and how it ends is what it is under torchrun."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.recorder.storage import ring_layout
from tests.scenarios.harmless.alone import defects, make_folder, read_rings, run_recorded
from tests.scenarios.running import JOBS, PATIENT, clean_environment, free_port, marked_lines, run, words_of

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
WRAP = (sys.executable, "-m", "ddpdoctor", "wrap", "--quiet", "--debug-level", "OFF")
_CHANGES = (
    (re.compile(r"\[?[IWE]\d{4} [\d:.]+ +\d+"), "<time pid"),
    (re.compile(r"\[[IWE]\d{4} [\d:.]+"), "<time"),
    (re.compile(r"\b(time +: |host +: |traceback : ).*"), r"\1"),
    (re.compile(r"\(?pid: \d+\)?|pid \d+|process \d+|0x[0-9a-f]+"), "<pid>"),
)


def job(command: tuple[str, ...], *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    own = [f"--report-dir={cwd / 'run'}"] if "ddpdoctor" in command else []
    return subprocess.run(
        [*command, *own, f"--master-port={free_port()}", *args],
        capture_output=True, stdin=subprocess.DEVNULL, cwd=cwd, check=False, timeout=200, env=clean_environment(**env),
    )  # fmt: skip


def lines_of(stderr: bytes) -> list[str]:
    text = stderr.decode()
    for pattern, instead in _CHANGES:
        text = pattern.sub(instead, text)
    return text.splitlines()


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize("ends", [pytest.param("0", marks=pytest.mark.cold), "killed"])
def test_streams_and_status_are_those_of_torchrun(ends: str, tmp_path: Path) -> None:
    args = ("--nproc-per-node=1", *words_of("prints_everything"))
    bare = job(TORCHRUN, *args, cwd=tmp_path, ENDS=ends)
    wrapped = job(WRAP, *args, cwd=tmp_path, ENDS=ends)
    assert wrapped.stdout == bare.stdout
    assert bytes(range(256)) + b"no end of line" in bare.stdout
    assert wrapped.returncode == bare.returncode
    expected, got = lines_of(bare.stderr), lines_of(wrapped.stderr)
    if ends == "0":
        assert got == expected
        return
    # What torchrun itself says of the failure is in its file. All before that is the script's.
    said_by_torchrun = next(at for at, line in enumerate(expected) if "elastic/multiprocessing/api.py" in line)
    assert got[:said_by_torchrun] == expected[:said_by_torchrun]
    kept = lines_of((tmp_path / "run" / "torchrun.log").read_bytes())
    assert kept[: len(expected) - said_by_torchrun] == expected[said_by_torchrun:]


@pytest.mark.usefixtures("preloaded_python")
def test_streams_of_all_ranks_go_where_torchrun_was_set(tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}", "--redirects=3", "--tee=1")
    wrapped = job(WRAP, *options, *words_of("prints_everything"), cwd=tmp_path, ENDS="3")
    assert wrapped.returncode == 1
    assert b"no end of line" in wrapped.stdout
    assert b"2 of 3" not in wrapped.stderr
    assert len([path for path in (tmp_path / "logs").rglob("stderr.log") if b"2 of 3" in path.read_bytes()]) == 2


@pytest.mark.usefixtures("preloaded_python")
def test_a_job_that_removes_the_run_folder_ends_as_it_would(tmp_path: Path) -> None:
    """The folder of a run is where the script works, and the script takes both away, with the page and the metrics."""
    work = tmp_path / "work"
    work.mkdir()
    outputs = ("--fail-on=warning", f"--html={work / 'page.html'}", f"--metrics-file={work / 'metrics.prom'}")
    job_of_two = ("--nproc-per-node=2", *words_of("removes_its_folder"), "3")
    done = job((*WRAP, *outputs, "--exit-status-of-verdict", "--log-findings"), *job_of_two, cwd=work)
    assert done.returncode == 1, done.stderr.decode()
    assert b"Traceback" not in done.stderr.split(b"\n")[-2:]
    assert done.stderr.count(b"no report: the run folder") == 1
    assert b"internal error" not in done.stderr


def test_isolated_pythons_run_and_are_said_to_be_unrecorded(tmp_path: Path) -> None:
    ran = run(JOBS / "isolated.sh", tmp_path, "--no-python", *PATIENT, ranks=2, PYTHON=sys.executable)
    assert (ran.status, ran.stdout) == (0, "out\nout\n"), ran.stderr
    assert ran.report["verdict"] is None
    (finding,) = ran.report["findings"]
    assert (finding["code"], finding["ranks"]) == ("DD901", [0, 1])


def test_a_job_that_fits_into_its_limits_does_so_under_wrap(tmp_path: Path) -> None:
    words = (f"--report-dir={tmp_path / 'run'}", f"--master-port={free_port()}", "--nproc-per-node=4")
    command = shlex.join([*WRAP[:-2], *words, *words_of("clean_plain")])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v {800 * 1024}; exec {command}"],
        capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=200, env=clean_environment(),
    )  # fmt: skip
    assert (done.returncode, b"defect" in done.stderr) == (0, False), done.stderr.decode()


@pytest.mark.usefixtures("preloaded_python")
def test_attempts_leave_one_ring_each_and_no_evidence_of_the_dead(tmp_path: Path) -> None:
    ran = run("fails_twice", tmp_path, "--max-restarts", "2", "--debug-level", "OFF", *PATIENT, ranks=2)
    assert ran.report["job"]["status"] == "finished", ran.stderr
    assert len(list((tmp_path / "rings").glob("*.ring"))) == 6
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 8 * 2**20


def test_loader_workers_leave_nothing_behind(tmp_path: Path) -> None:
    """Files and memory stay flat over epochs."""
    ran = run("loader_workers", tmp_path, "--debug-level", "OFF", *PATIENT, ranks=1, args=("8", "5"))
    epochs = [[int(field) for field in line.split()] for line in ran.stdout.splitlines()]
    assert len(epochs) == 5, ran.stderr
    assert len({(files, size) for _, files, size, _ in epochs[1:]}) == 1, epochs
    assert epochs[-1][3] - epochs[1][3] < 2048, epochs
    verdict = ran.report["verdict"]
    assert (verdict["kind"], verdict["where"][0]["line"]) == ("crash", marked_lines("loader_workers")[0])


# What the recorder keeps of real processes is bounded, however long they run; what a verdict rests on finds room.


CHILDREN = """
import multiprocessing, os, sys
def work(code): os._exit(code)
def main():
    context = multiprocessing.get_context("fork")
    for number in range(int(sys.argv[1])):
        child = context.Process(target=work, args=(number % 2,))
        child.start()
        child.join()
    raise LookupError("the end")
if __name__ == "__main__":
    main()
"""
SITES = """
import gc, sys, weakref
from _ddpdoctor_recorder import calls
from _ddpdoctor_recorder.state import here
codes = []
for number in range(20000):
    names = {}
    source = "def f():\\n" + "\\n" * number + " return begin('all_reduce')"
    exec(compile(source, "made.py", "exec"), {"begin": lambda op: calls.begin(op)}, names)
    names["f"]()
    codes.append(weakref.ref(names["f"].__code__))
names = None
gc.collect()
print(sum(code() is not None for code in codes))
raise LookupError("the end")
"""
MANY_CALLS = """
import os, torch, torch.distributed as dist
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
dist.init_process_group("gloo")
tensor, seen = torch.ones(1), []
for number in range(40_001):
    dist.all_reduce(tensor)
    if number % 10_000 == 0 and number:
        seen.append(resident())
for number in range(300):
    group = dist.new_group([0])
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
del group
from _ddpdoctor_recorder import groups
print(seen[-1] - seen[0], len(groups._known))
"""


def raised(folder: Path) -> list[str]:
    (ring,) = read_rings(folder)
    return [note["type"] for note in ring.notes if note.get("k") == "raised"]


def folder_size(folder: Path) -> int:
    sizes = [path.stat().st_size for path in folder.rglob("*.ring")]
    return sum(size for size in sizes if size > ring_layout.CHILD_SHAPE.total_bytes)


def test_ends_of_many_children_leave_room_for_the_crash(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    (tmp_path / "script.py").write_text(CHILDREN)
    run_recorded(folder, str(tmp_path / "script.py"), "300")
    (ring,) = read_rings(folder)
    assert len([note for note in ring.notes if note.get("k") == "child_end"]) == 64
    assert raised(folder) == ["LookupError"]
    assert defects(folder) == []
    assert list(folder.glob("lost-*")) == []


def test_code_that_is_made_at_run_time_is_let_go_and_leaves_room_for_the_crash(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    done = run_recorded(folder, "-c", SITES)
    assert int(done.stdout) < 10, done.stderr.decode()
    assert raised(folder) == ["LookupError"]


def test_calls_and_groups_leave_nothing_behind(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    done = run_recorded(folder, "-c", MANY_CALLS, OMP_NUM_THREADS="1")
    assert done.status == 0, done.stderr.decode()
    grown, groups = map(int, done.stdout.split())
    assert grown < 2**20
    assert groups < 20
    assert folder_size(folder) == ring_layout.RANK_SHAPE.total_bytes
