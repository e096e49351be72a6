"""Limits, memory, shared memory and torch for real: the kernel's own limits, mounts and control groups."""

import os
import re
import subprocess
import sys

import pytest

from tests.needs import need, need_programs
from tests.scenarios.check_env.running import check_env

OWN_PIDS = ("--pid", "--fork", "--mount-proc")
"""For tests of /dev/shm: the loader workers of other tests would count too."""


def need_root():
    need(os.geteuid() == 0, "needs root: mounts and control groups")


def in_mounts(script, *namespaces):
    """Return the beginning of a command that runs in mounts of its own, as the script has changed them."""
    need_root()
    need_programs("unshare")
    return ("unshare", "--mount", *namespaces, "--propagation", "private", "sh", "-ec", f'{script}; exec "$@"', "sh")


def test_a_low_limit_on_open_files():
    need_programs("prlimit")
    seen = check_env("nofile", before=("prlimit", "--nofile=1024:4096"))
    kind, severity, summary, fix = seen.only()
    assert (kind, severity, seen.status) == ("nofile", "warning", 0)
    assert summary.startswith("The limit of open files is only 1024")
    assert seen.checks["nofile"]["seen"] == "soft limit 1024, hard limit 4096"
    assert fix.startswith("ulimit -n 4096, and ") or "--ulimit nofile=65536:65536" in fix


def test_few_processes_are_left_to_a_user():
    """In a user namespace, where this user is no root: root is not bound by the limit."""
    need_root()
    need_programs("unshare")
    before = ("prlimit", "--nproc=40:45")
    assert check_env("nproc-pids", before=before).findings == []
    seen = check_env("nproc-pids", before=(*before, "unshare", "--user", "--map-user=1000"))
    kind, severity, summary, fix = seen.only()
    assert (kind, severity, fix) == ("nproc-pids", "warning", "ulimit -u 45")
    assert "RLIMIT_NPROC of this user is 40" in summary


def test_a_cpu_quota(group):
    before = group("cpu", v1_cpu__cfs_quota_us=150000, v1_cpu__cfs_period_us=100000, v2_cpu__max="150000 100000")
    two = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0"}
    kind, severity, summary, _ = check_env("cpu-quota", before=before, **two).only()
    assert (kind, severity) == ("cpu-quota", "warning")
    assert re.fullmatch(r"Fewer CPUs than ranks: a quota of 1.5 of \d+ CPUs for 2 ranks", summary)
    assert check_env("cpu-quota", before=before, OMP_NUM_THREADS="1").findings == []
    assert check_env("cpu-quota", before=before, OMP_NUM_THREADS="2").only()[3] == "export OMP_NUM_THREADS=1"


def test_ranks_that_are_bound_to_one_cpu():
    need_programs("taskset")
    cpu = min(os.sched_getaffinity(0))
    seen = check_env("cpu-quota", before=("taskset", "-c", str(cpu)), LOCAL_WORLD_SIZE="2", RANK="0", WORLD_SIZE="2")
    assert seen.only()[2] == "Fewer CPUs than ranks: 1 CPU for 2 ranks"


def test_a_memory_limit_and_a_kill_for_it(group):
    size = 512 << 20
    before = group("memory", v1_memory__limit_in_bytes=size, v2_memory__max=size)
    kind, severity, summary, _ = check_env("mem-limit", before=before).only()
    assert (kind, severity) == ("mem-limit", "warning")
    assert summary == "Less than 2 GiB of memory per rank is left under the cgroup's limit"

    greedy = "import os; os.write(1, b'x'); b'1' * (2 << 30)"
    killed = subprocess.run([*before, sys.executable, "-c", greedy], capture_output=True, check=False, timeout=200)
    need(killed.returncode == -9, "needs a kernel that kills at the limit (no swap)")

    again = check_env("mem-limit", before=before)
    assert "The OOM killer was active before under the current memory limit" in [one[2] for one in again.findings]
    assert "1 OOM kill" in again.checks["mem-limit"]["seen"]


@pytest.mark.parametrize(
    ("options", "then", "severity", "says"),
    [
        ("size=16m", "", "error", "/dev/shm"), ("size=1g", "", "", ""),
        ("ro,size=1g", "", "error", "/dev/shm is not writable"),
        ("size=600m", "; head -c 580m /dev/zero > /dev/shm/full", "warning", "/dev/shm is full"),
    ],
)  # fmt: skip
def test_a_small_a_closed_and_a_full_shm(options, then, severity, says):
    seen = check_env("shm", before=in_mounts(f"mount -t tmpfs -o {options} shm /dev/shm{then}", *OWN_PIDS))
    assert [finding[:2] for finding in seen.findings] == ([("shm", severity)] if severity else [])
    assert all(finding[2].startswith(says) for finding in seen.findings)
    assert seen.status == int(severity == "error")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13: cannot open"),
        ("import os; os.kill(os.getpid(), 4)", "built for another processor"),
    ],
)
def test_a_broken_torch_is_a_finding(text, says, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    seen = check_env("DD10", torch=True, PYTHONPATH=path)
    kind, severity, summary, fix = seen.only()
    assert (kind, severity, seen.status) == ("torch-import", "error", 1)
    assert says in summary
    assert fix


def test_a_healthy_torch_and_one_that_is_not_imported():
    assert re.match(r"torch \d", check_env("torch-import", torch=True).checks["torch-import"]["seen"])
    assert check_env("torch-import").checks["torch-import"]["seen"].endswith("it was not imported")
