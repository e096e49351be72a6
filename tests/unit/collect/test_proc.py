"""Processes and kernel facts, on this machine and on trees of other machines."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.collect import proc
from ddpdoctor.collect.files import read_text
from ddpdoctor.collect.machine.cgroups import read_oom_kills
from tests.scenarios.running import wait_for


def test_this_process() -> None:
    process = proc.read_process(os.getpid())
    assert process is not None
    assert (process.ppid, process.state) == (os.getppid(), "R")
    assert proc.read_process(2**22 + 1) is None


def test_a_setting_of_the_kernel_is_read_like_any_file() -> None:
    assert read_text(Path("/proc/sys/kernel/ostype")) == "Linux\n"


def test_a_name_with_brackets_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) b (c) S 3 " + " ".join(str(n) for n in range(5, 40)))
    process = proc.read_process(7, tmp_path)
    assert process is not None
    assert (process.name, process.ppid, process.start_ticks) == ("a) b (c", 3, 22)


def test_descendants_and_io() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        assert wait_for(lambda: proc.descendants(child.pid, proc.read_processes()) != ())
        below = proc.descendants(os.getpid(), proc.read_processes())
        assert child.pid in {p.pid for p in below}
        assert len(below) >= 2
        io = proc.read_io(child.pid)
        assert io is not None
        assert io.read > 0
    finally:
        child.communicate(b"\n")


def test_a_signal_that_is_caught() -> None:
    assert proc.catches_signal(os.getpid(), signal.SIGINT)
    assert not proc.catches_signal(os.getpid(), signal.SIGURG)


@pytest.mark.parametrize(
    ("cgroup", "files", "kills"),
    [
        ("0::/job", {"job/memory.events": "low 0\noom 3\noom_kill 2\n"}, 2),
        ("4:memory:/job\n0::/", {"memory/job/memory.oom_control": "under_oom 0\noom_kill 5\n"}, 5),
        ("4:cpu,memory:/job", {"memory/job/memory.oom_control": "under_oom 0\n"}, None),
        ("0::/", {"memory.events": "oom_kill 0\n"}, 0),
        ("", {}, None),
    ],
)
def test_oom_kills_of_both_cgroup_versions(
    cgroup: str, files: dict[str, str], kills: int | None, tmp_path: Path
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_oom_kills(tmp_path / "proc", tmp_path / "sys") == kills


def test_what_a_process_wanted_to_run(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("652581 40283039 2\n")
    assert proc.read_wanted_ns(7, tmp_path) == 40_935_620
    assert proc.read_wanted_ns(8, tmp_path) is None
    (tmp_path / "7" / "schedstat").write_text("0\n")
    assert proc.read_wanted_ns(7, tmp_path) is None
