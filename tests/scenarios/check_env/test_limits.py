"""Limits, memory, disks, torch and clocks for real: the kernel's own limits, mounts, control groups and wrong clocks.

Control groups of version 1 and 2, whichever the machine has with the controller that is wanted.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.hosts import lent_hosts
from tests.scenarios.running import clean_environment

CHECK_ENV = (sys.executable, "-m", "ddpdoctor", "check-env", "--format", "json")
CGROUPS = Path("/sys/fs/cgroup")
OWN_PIDS = ("--pid", "--fork", "--mount-proc")
"""For tests of /dev/shm: the loader workers of other tests would count too."""


def need(condition, reason):
    """Skip a test that this machine cannot run; in CI that is a failure."""
    if not condition:
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


def need_root():
    need(os.geteuid() == 0, "needs root: mounts and control groups")


def need_tool(name):
    need(shutil.which(name), f"needs {name}")


class Seen:
    """The report of one run."""

    def __init__(self, done):
        assert done.stdout.startswith("{"), done.stderr
        self.status, self.report = done.returncode, json.loads(done.stdout)
        self.checks = {check["id"]: check for check in self.report["checks"]}
        self.findings = [(one["kind"], one["severity"], one["summary"], one["fix"]) for one in self.report["findings"]]

    def only(self):
        (finding,) = self.findings
        return finding


def check_env(*arguments, before=(), torch=False, limit_s=100, **variables):
    """Run the checks that are named, behind the commands ``before``."""
    options = () if torch else ("--no-torch",)
    environment = {name: value for name, value in clean_environment().items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*before, *CHECK_ENV, *options, *arguments],
        check=False, capture_output=True, text=True, timeout=limit_s, env=environment | variables,
    )  # fmt: skip
    return Seen(done)


def in_mounts(script, *namespaces):
    """Return the beginning of a command that runs in mounts of its own, as the script has changed them."""
    need_root()
    need_tool("unshare")
    return ("unshare", "--mount", *namespaces, "--propagation", "private", "sh", "-ec", f'{script}; exec "$@"', "sh")


@pytest.fixture
def group():
    """Make control groups with limits; each call returns the beginning of a command that runs in one."""
    made = []

    def make(controller, **limits):
        need_root()
        v1 = (CGROUPS / controller).is_dir()
        top = CGROUPS / controller if v1 else CGROUPS
        has = v1 or controller in (top / "cgroup.subtree_control").read_text().split()
        need(has, f"needs the control group controller {controller}")
        folder = top / f"ddpdoctor-test-{os.getpid()}-{len(made)}"
        folder.mkdir()
        made.append(folder)
        for name, value in limits.items():
            file = name.removeprefix("v1_") if v1 else name.removeprefix("v2_")
            if name.startswith("v1_" if v1 else "v2_"):
                (folder / file.replace("__", ".")).write_text(str(value))
        return ("sh", "-ec", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh")

    yield make
    for folder in made:
        folder.rmdir()


def test_a_low_limit_on_open_files():
    need_tool("prlimit")
    seen = check_env("nofile", before=("prlimit", "--nofile=1024:4096"))
    kind, severity, summary, fix = seen.only()
    assert (kind, severity, seen.status) == ("nofile", "warning", 0)
    assert summary.startswith("The limit of open files is only 1024")
    assert seen.checks["nofile"]["seen"] == "soft limit 1024, hard limit 4096"
    assert fix.startswith("ulimit -n 4096, and ") or "--ulimit nofile=65536:65536" in fix


def test_a_limit_on_open_files_that_a_large_job_cannot_live_with():
    need_tool("prlimit")
    seen = check_env("nofile", before=("prlimit", "--nofile=1024:1024"), RANK="0", WORLD_SIZE="512")
    assert (seen.only()[1], seen.status) == ("error", 1)
    assert "512 ranks needs 2176" in seen.only()[2]


def test_the_command_that_is_shown_raises_the_limit():
    need_tool("prlimit")
    before = ("prlimit", "--nofile=1024:4096")
    first = check_env("nofile", before=before).only()[3].partition(",")[0]
    assert first == "ulimit -n 4096"
    seen = check_env("nofile", before=(*before, "sh", "-ec", f'{first}; exec "$@"', "sh"))
    assert seen.checks["nofile"]["seen"] == "soft limit 4096, hard limit 4096"


def test_few_processes_are_left_to_a_user():
    """In a user namespace, where this user is no root: root is not bound by the limit."""
    need_root()
    need_tool("unshare")
    before = ("prlimit", "--nproc=40:45")
    assert check_env("nproc-pids", before=before).findings == []
    seen = check_env("nproc-pids", before=(*before, "unshare", "--user", "--map-user=1000"))
    kind, severity, summary, fix = seen.only()
    assert (kind, severity, fix) == ("nproc-pids", "warning", "ulimit -u 45")
    assert "RLIMIT_NPROC of this user is 40" in summary


def test_few_tasks_are_left_in_a_control_group(group):
    before = group("pids", v1_pids__max=60, v2_pids__max=60)
    kind, severity, summary, _ = check_env("nproc-pids", before=before).only()
    assert (kind, severity) == ("nproc-pids", "warning")
    assert summary.endswith("pids.max of the cgroup is 60")


def test_a_cpu_quota(group):
    before = group("cpu", v1_cpu__cfs_quota_us=150000, v1_cpu__cfs_period_us=100000, v2_cpu__max="150000 100000")
    two = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0"}
    kind, severity, summary, _ = check_env("cpu-quota", before=before, **two).only()
    assert (kind, severity) == ("cpu-quota", "warning")
    assert re.fullmatch(r"Fewer CPUs than ranks: a quota of 1.5 of \d+ CPUs for 2 ranks", summary)
    assert check_env("cpu-quota", before=before, OMP_NUM_THREADS="1").findings == []
    assert check_env("cpu-quota", before=before, OMP_NUM_THREADS="2").only()[3] == "export OMP_NUM_THREADS=1"


def test_a_quota_of_a_group_above(group):
    before = group("cpu", v1_cpu__cfs_quota_us=50000, v1_cpu__cfs_period_us=100000, v2_cpu__max="50000 100000")
    need((CGROUPS / "cpu").is_dir(), "needs control groups of version 1")
    folder = re.search(r"(/\S+)/cgroup.procs", before[2]).group(1)
    inner = Path(folder) / "inner"
    inner.mkdir()
    try:
        below = ("sh", "-ec", f'echo $$ > {inner}/cgroup.procs; exec "$@"', "sh")
        assert "a quota of 0.5 of" in check_env("cpu-quota", before=below).only()[2]
    finally:
        inner.rmdir()


def test_ranks_that_are_bound_to_one_cpu():
    need_tool("taskset")
    cpu = min(os.sched_getaffinity(0))
    seen = check_env("cpu-quota", before=("taskset", "-c", str(cpu)), LOCAL_WORLD_SIZE="2", RANK="0", WORLD_SIZE="2")
    assert seen.only()[2] == "Fewer CPUs than ranks: 1 CPU for 2 ranks"


def test_openmp_threads_of_several_ranks():
    several = {"LOCAL_WORLD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2"}
    need(len(os.sched_getaffinity(0)) > 1, "needs two CPUs")
    kind, severity, _, fix = check_env("omp", **several).only()
    assert (kind, severity) == ("omp", "warning")
    assert check_env("omp", **several, OMP_NUM_THREADS=fix.rpartition("=")[2]).findings == []


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
    ("size", "severity", "status"),
    [("16m", "error", 1), ("64m", "warning", 0), ("256m", "warning", 0), ("1g", None, 0)],
)
def test_a_small_shm(size, severity, status):
    seen = check_env("shm", before=in_mounts(f"mount -t tmpfs -o size={size} shm /dev/shm", *OWN_PIDS))
    assert [finding[:2] for finding in seen.findings] == ([("shm", severity)] if severity else [])
    assert seen.status == status


def test_a_full_and_a_closed_shm():
    mount = "mount -t tmpfs -o size=600m shm /dev/shm; head -c 580m /dev/zero > /dev/shm/full"
    assert check_env("shm", before=in_mounts(mount, *OWN_PIDS)).only()[2].startswith("/dev/shm is full")
    mount = "mount -t tmpfs -o ro,size=1g shm /dev/shm"
    closed = check_env("shm", before=in_mounts(mount, *OWN_PIDS)).only()
    assert (closed[1], closed[2].startswith("/dev/shm is not writable")) == ("error", True)


LOADER = """
import sys, time, torch
from torch.utils.data import DataLoader
loader = iter(DataLoader(range(1000), num_workers=1, persistent_workers=True))
next(loader)
open(sys.argv[1], "w").close()
time.sleep(200)
"""


def test_a_small_shm_while_loader_workers_run(tmp_path):
    (tmp_path / "training.py").write_text(LOADER)
    training = f"{shlex.join([sys.executable, str(tmp_path / 'training.py'), str(tmp_path / 'ready')])} &"
    script = f"mount -t tmpfs -o size=64m shm /dev/shm; {training} until [ -e {tmp_path}/ready ]; do sleep 0.1; done"
    seen = check_env("shm", before=in_mounts(script, *OWN_PIDS))
    assert (seen.only()[1], seen.status) == ("error", 1)
    assert "1 loader workers" in seen.checks["shm"]["seen"]


def test_a_full_and_a_closed_place_for_temporary_files(tmp_path):
    full = in_mounts(f"mount -t tmpfs -o size=20m tmp {tmp_path}")
    kind, severity, summary, fix = check_env("disk", before=full, TMPDIR=str(tmp_path)).only()
    assert (kind, severity, fix) == ("disk", "warning", "export TMPDIR=/path/on/another/disk")
    assert summary == f"{tmp_path} (temporary files) is nearly full: less than 1 GiB left for this user"
    closed = in_mounts(f"mount -t tmpfs -o ro,size=2g tmp {tmp_path}")
    assert check_env("disk", before=closed, TMPDIR=str(tmp_path)).only()[2].endswith("is not writable")


def test_deep_measures_how_fast_disks_are(tmp_path):
    seen = check_env("disk", "shm", "--deep", TMPDIR=str(tmp_path))
    assert re.search(r", writes [0-9.]+ MB/s$", seen.checks["shm"]["seen"])
    assert re.search(r"writes [\d.]+ MB/s", seen.checks["disk"]["seen"])
    assert list(tmp_path.iterdir()) == []


def test_a_short_queue_of_connections():
    need_root()
    before = ("unshare", "--net", "sh", "-ec", 'echo 64 > /proc/sys/net/core/somaxconn; exec "$@"', "sh")
    job = {"RANK": "0", "WORLD_SIZE": "128"}
    assert check_env("somaxconn", before=before, **job).only()[3] == "sudo sysctl -w net.core.somaxconn=4096"
    assert check_env("somaxconn", before=before, **job | {"WORLD_SIZE": "64"}).findings == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13: cannot open"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
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


def on_hosts(hosts, checks, before, **variables):
    """Run the checks on all hosts, started by hand; ``before`` is put in front of the last one's command."""
    options = ["--no-torch", "--nnodes", str(hosts.count), "--master-addr", hosts.address(0), "--master-port", "29611"]
    started = []
    for number in range(hosts.count):
        last = number == hosts.count - 1
        command = [*(before if last else ()), *CHECK_ENV, *options, *checks, "--node-rank", str(number)]
        environment = clean_environment(**(variables if last else {}))
        started.append(hosts.start(number, *command, env=environment))
    out, err = started[0].communicate(timeout=200)
    for other in started[1:]:
        other.communicate(timeout=200)
    return Seen(subprocess.CompletedProcess([], started[0].returncode, out, err))


@pytest.mark.parametrize(
    ("count", "off", "severity", "summary", "one_is_to_blame"),
    [
        (
            2,
            "+20s",
            "error",
            r"The clock of dd1 is (20|19)\.\d s ahead of the clock of dd0: from 15 s on, torchrun's .*",
            False,
        ),
        (3, "-20s", "error", r"The clock of dd2 is (20|19)\.\d s behind the others: from 15 s on, torchrun's .*", True),
        (
            3,
            "+3s",
            "warning",
            r"The clock of dd2 is (3|2)\.\d s ahead of the others: the log times of two hosts do not match",
            True,
        ),
    ],
)
def test_a_host_whose_clock_is_wrong(count, off, severity, summary, one_is_to_blame):
    need_tool("faketime")
    with lent_hosts(count) as hosts:
        seen = on_hosts(hosts, ["clock"], ("faketime", "-f", off))
    (finding,) = seen.report["findings"]
    assert (finding["kind"], finding["severity"]) == ("clock", severity)
    assert re.fullmatch(summary, finding["summary"])
    assert finding["hosts"] == (["dd2"] if one_is_to_blame else ["dd0", "dd1"])
    assert finding["confidence"] == ("high" if one_is_to_blame else "low")


def test_a_host_with_another_torch(tmp_path):
    """By its metadata, as with --no-torch: what PYTHONPATH names comes before what is installed."""
    (tmp_path / "torch-2.0.1.dist-info").mkdir()
    (tmp_path / "torch-2.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with lent_hosts(3) as hosts:
        seen = on_hosts(hosts, ["version-same"], (), PYTHONPATH=path)
    kind, severity, summary, _ = seen.only()
    assert (kind, severity, seen.status) == ("version-same", "error", 1)
    assert re.fullmatch(r"torch 2\.0\.1 on dd2, \S+ on 2 others", summary)
    assert seen.report["findings"][0]["hosts"] == ["dd2"]
