"""What a machine says of its limits, load, firewall, kernel, names and variables."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory

import pytest

from ddpdoctor.collect.blocked import LockLine, read_lock_file, read_lock_files, read_locks
from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.kernel import GRANT, read_kernel_log, read_log
from ddpdoctor.collect.limits import (
    find_busy,
    measure_writing,
    own_work,
    parse_cpu_times,
    read_clock,
    read_governors,
    read_limits,
    read_load,
    read_own_times,
    steal_share,
)
from ddpdoctor.collect.network import has_mesh_proxy, master_name, read_firewall, read_names
from ddpdoctor.collect.recorded import lock_of
from ddpdoctor.collect.software import cuda_of_wheel, read_conf_files, read_software
from ddpdoctor.collect.system import ReadingPlan, System, SystemCalls, is_shared, mount_of
from ddpdoctor.model.facts import LockFile, LockKind
from ddpdoctor.model.node import Clock, Governor, Limit
from ddpdoctor.model.reading import NotRead, Why
from tests.golden import table, words
from tests.machines import DATA, RecordedCalls, load_machine, shared_machine

# Limits, control groups, file systems, versions and the clock, read from recorded machines and from this one.


GIB = 1 << 30
PLAN = ReadingPlan(sections=frozenset())


def tree(root, files, env=None, **answers):
    """Return a machine of these files and answers."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return System(root=root, env=env or {}, calls=RecordedCalls(answers=answers))


def test_the_tightest_of_nested_groups(tmp_path):
    machine = load_machine("container-nogpu", tmp_path)
    job = {"cpu.max": "400000 100000", "memory.max": 8 * GIB, "memory.current": 7 * GIB, "pids.max": 500}
    step = {"cpu.max": "max 100000", "memory.max": 6 * GIB, "memory.current": GIB, "pids.max": 100, "pids.current": 2}
    task = {"cpu.max": "800000 100000", "memory.max": "max", "memory.current": GIB}
    for folder, files in {"job": {**job, "pids.current": 450}, "job/step": step, "job/step/task": task}.items():
        machine.path(f"/sys/fs/cgroup/{folder}").mkdir()
        for name, text in files.items():
            machine.path(f"/sys/fs/cgroup/{folder}/{name}").write_text(f"{text}\n")
    machine.path("/proc/self/cgroup").write_text("0::/job/step/task\n")
    seen = read_limits(machine, PLAN)
    assert seen.cpu_quota == 4.0
    # 1 GiB is left of the job's limit, 5 GiB of the step's.
    assert (seen.memory_limit_bytes, seen.memory_used_bytes) == (8 * GIB, 7 * GIB)
    assert (seen.pids_max, seen.pids_current) == (500, 450)


def test_leftovers_in_shared_memory(tmp_path):
    machine = load_machine("container-nogpu", tmp_path, "leftovers")
    # Fresh files may belong to a job that is just starting.
    assert read_limits(machine, PLAN).shm.stale_files == ()
    old = time.time() - 3600
    for name in machine.names("/dev/shm"):
        os.utime(machine.path(f"/dev/shm/{name}"), (old, old))
    shm = read_limits(machine, PLAN).shm
    assert shm.stale_files == ("/dev/shm/nccl-Xy12Zw", "/dev/shm/torch_900_123456_0")
    assert (shm.stale_bytes, shm.loader_workers) == (len("left\n") + len("gone\n"), 1)


def test_tmpdir_is_looked_at_and_tmp_as_well_and_a_volume_that_cannot_be_asked_says_so():
    env = {"TMPDIR": "/raid/run", "XDG_CACHE_HOME": "/home/user/none/yet"}
    volumes = read_limits(shared_machine("nvlink8", env=env), PLAN).volumes
    assert [(volume.path, volume.purpose) for volume in volumes] == [
        ("/raid/run", "temporary files, working directory"), ("/home/user", "cache, /tmp"),
    ]  # fmt: skip
    stale = shared_machine("container-nogpu")
    stale.calls.errors["statvfs /tmp"] = "116 Stale file handle"
    (volume,) = read_limits(stale, PLAN).volumes
    assert (volume.error, volume.total_bytes) == ("Stale file handle", 0)


MOUNTS = """\
disk / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
bucket /home/me/s3 fuse.s3fs rw 0 0
b /my\\040data xfs rw
server:/a /my\\040data fuse.ceph rw 0 0
d /my overlay rw
short
"""


def test_mounts_with_spaces_and_one_over_another_and_a_path_is_shared_if_its_deepest_mount_is(tmp_path):
    machine = tree(tmp_path, {"/proc/mounts": MOUNTS})
    assert mount_of(machine, "/my data/x") == ("/my data", "fuse.ceph")
    assert mount_of(machine, "/mydata") == ("/", "ext4")
    paths = ("/tmp/x", "/home/me/x", "/home/me/s3/x", "/my data/x")
    assert [is_shared(Path(path), machine) for path in paths] == [False, True, False, True]
    (tmp_path / "unreadable" / "proc" / "mounts").mkdir(parents=True)
    assert mount_of(System(root=tmp_path / "unreadable"), "/x") == ("/", None)


def test_a_system_without_proc_and_sys(tmp_path):
    calls = RecordedCalls({"platform": "darwin", "hostname": "mac", "kernel": "24.1.0", "cpus": "0-9"})
    calls.answers["rlimit NOFILE"] = "256 -1"
    machine = System(root=tmp_path, env={}, calls=calls)
    seen = read_limits(machine, PLAN)
    assert (seen.nofile, seen.nproc, seen.shm) == (Limit(soft=256, hard=None), None, None)
    assert (seen.cpus_online, seen.somaxconn, seen.numa_nodes, seen.user_processes) == (10, None, 0, None)
    assert read_clock(machine, PLAN) == Clock(synchronized=None, offset_s=None)
    software = read_software(machine, PLAN)
    assert (software.platform, software.os_name, software.container, software.driver) == ("darwin", "", None, None)


def test_this_machine():
    seen = read_limits(System(), PLAN)
    assert seen.cpus_allowed == tuple(sorted(os.sched_getaffinity(0)))
    assert seen.memory_total_bytes > seen.memory_available_bytes > 0
    assert seen.user_processes > 0
    assert seen.volumes[0].total_bytes > 0
    assert read_clock(System(), PLAN).synchronized in {True, False}
    names = read_names(System(), PLAN_NAMES)
    assert (names.hostname, bool(names.own.addresses)) == (socket.gethostname(), names.own.error is None)
    if sys.platform == "linux":
        load = read_load(System(), PLAN_LOAD)
        assert load.window_s > 0
        assert all(0 < one.share <= 1 and one.cpu < os.cpu_count() for one in load.busy)
    try:
        assert all("\n" not in text for _, text in read_log(System()))  # a text may be empty
    except NotRead as missing:
        assert missing.unread.why in {Why.DENIED, Why.ABSENT}  # noqa: PT017 - either answer is right


def test_write_speed_is_measured_and_leaves_nothing(tmp_path):
    assert measure_writing(str(tmp_path), 16 << 20, limit_s=5.0) > 0
    assert list(tmp_path.iterdir()) == []
    assert measure_writing(str(tmp_path), 1 << 20) is None


def container(files, **env):
    """Return the container that a machine of these files is, and its image."""
    with TemporaryDirectory() as folder:
        machine = tree(Path(folder), files, env, hostname="h", kernel="5.15.167.4-microsoft-standard-WSL2")
        software = read_software(machine, PLAN)
    assert software.wsl
    return f"{software.container}, image {software.image}"


def test_the_hosts_file_without_a_machines_own_lines(tmp_path):
    read = []
    for host, own in (("a1", "10.0.0.1 a1"), ("a2", "10.0.0.2 a2.cluster a2"), ("a3", "10.0.0.3 elsewhere")):
        hosts = f"127.0.0.1 localhost\n::1 localhost # x\n{own}\n10.0.0.9 nas\n"
        machine = tree(tmp_path / host, {"/etc/hosts": hosts}, hostname=host, kernel="6")
        read.append(read_software(machine, PLAN))
    others = [set(one.hosts_lines) - set(one.hosts_own) for one in read]
    assert others[0] == others[1] < others[2]
    assert [(len(one.hosts_lines), len(one.hosts_own)) for one in read] == [(2, 1), (2, 1), (2, 0)]


# How busy a machine is with what is not ours, from /proc/stat as recorded and from this machine.


PLAN_LOAD = ReadingPlan(sections=frozenset({"load"}))
HEAD = "cpu  0 0 0 0 0 0 0 0 0 0\n"


def stat(*lines):
    return parse_cpu_times(HEAD + "".join(f"cpu{number} {line}\n" for number, line in enumerate(lines)) + "ctxt 1\n")


def shares(before, after, own=None):
    return {one.cpu: round(one.share, 2) for one in find_busy(before, after, 1.0, own or {})}


START = stat("1000 0 500 9000 50 1 2 0 0 0", "1000 0 500 9000 50 1 2 0 0 0")


IDLE = "1000 0 500 9100 50 1 2 0 0 0"
DONE = [
    (IDLE, 0),  # idle for the whole second
    ("1000 0 500 9000 150 1 2 0 0 0", 0),  # waiting for a disk computes nothing
    ("1097 0 500 9003 50 1 2 0 0 0", 0.97),
    ("1000 0 550 9050 50 1 2 0 0 0", 0.5),  # the kernel
    ("1000 40 500 9060 50 1 2 0 0 0", 0.4),  # niced
    ("1000 0 500 9070 50 1 2 30 0 0", 0.3),  # the hypervisor
    ("1003 0 500 9097 50 1 2 0 0 0", 0),  # what a daemon does in passing
]
FULL, HALF = "1100 0 500 9000 50 1 2 0 0 0", "1050 0 500 9050 50 1 2 0 0 0"
OWN_WORK = [
    (("1100 0 500 8999 50 1 2 0 0 0", IDLE), {}, {0: 1.0}),  # idle time that is not counted to the tick
    ((FULL, HALF), {0: 1.0, 1: 0.5}, {}), ((FULL, HALF), {1: 0.5}, {0: 1.0}),
    (("1060 0 500 9040 50 1 2 0 0 0", "1040 0 500 9060 50 1 2 0 0 0"), {0: 1.0}, {}),  # a thread of ours moved
]  # fmt: skip


def test_what_a_processor_did_and_our_own_work_is_taken_off():
    for line, share in DONE:
        assert shares(START, stat(line, IDLE)).get(0, 0) == share, line
    for lines, own, busy in OWN_WORK:
        assert shares(START, stat(*lines), own) == busy


def test_work_is_counted_where_a_thread_was_seen_last_and_that_of_new_threads_as_a_whole():
    before = {"7/7": (5.0, 0), "7/8": (1.0, 0)}
    after = {"7/7": (5.25, 1), "9/9": (0.5, 1)}
    assert own_work(before, after) == {1: 0.75}


def test_what_the_hypervisor_took():
    assert steal_share(stat("60 0 20 9000 0 0 0 20 0 0").values()) == 0.2
    assert steal_share(stat("0 0 0 0 0 0 0 0 0 0").values()) is None


def test_a_system_that_does_not_count(tmp_path):
    sandbox = tree(tmp_path, {"/proc/stat": HEAD + "cpu0 0 0 0 0 0 0 0 0 0 0"})
    for system, reason in (
        (
            System(root=tmp_path / "none", calls=RecordedCalls()),
            "this system does not report how busy its processors are",
        ),
        (sandbox, "/proc/stat does not change here, as in a sandbox"),
    ):
        with pytest.raises(NotRead) as missing:
            read_load(system, PLAN_LOAD)
        assert (missing.value.unread.why, missing.value.unread.reason) == (Why.ABSENT, reason)


def test_governors(tmp_path):
    files = {}
    for cpu, name in enumerate(["powersave", "powersave", "performance"]):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/cpufreq"
        files |= {f"{folder}/scaling_governor": f"{name}\n", f"{folder}/scaling_driver": "acpi-cpufreq\n"}
    seen = read_governors(tree(tmp_path, files, cpus="0-2"))
    assert seen == (
        Governor(name="performance", driver="acpi-cpufreq", preference="", cpus=1),
        Governor(name="powersave", driver="acpi-cpufreq", preference="", cpus=2),
    )
    assert read_governors(System(root=tmp_path, calls=RecordedCalls(answers={"cpus": "3"}))) == ()


READER = """
import json, sys
from ddpdoctor.collect.limits import own_pids
from ddpdoctor.collect.system import System
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(sorted(own_pids(System()))))
"""


@contextmanager
def python(*arguments):
    process = subprocess.Popen([sys.executable, *arguments], stdin=PIPE, stdout=PIPE, text=True)
    with process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_whose_work_is_ours():
    waiting = "print('ready', flush=True); input()"
    with python("-c", READER) as rank, python("-c", READER) as twin, python("-c", waiting) as other:
        ours = json.loads(rank.communicate("go\n")[0])
        twin.stdin.close()
    assert {rank.pid, twin.pid, os.getpid()} <= set(ours)
    assert other.pid not in ours


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_work_of_a_child_is_ours():
    before = read_own_times(System())
    with python("-c", "print('working', flush=True)\nwhile True: pass"):
        while sum(own_work(before, read_own_times(System())).values()) < 0.1:
            pass


def refusing(nft, iptables):
    """Return the chains that refuse. "nft list ruleset" and "iptables-save" say a file of tests/data/firewall.

    "": nothing, None: there is no such program.
    """
    told = {"run nft list ruleset": nft, "run iptables-save": iptables}
    answers = {
        tool: (DATA / "firewall" / dump).read_text().replace("\n", "\\n") if dump else ""
        for tool, dump in told.items()
        if dump is not None
    }
    return read_firewall(System(root=Path("/nowhere"), env={}, calls=RecordedCalls(answers=answers)))


# Errors of GPUs in the kernel's log, and why it cannot be read.


PLAN_KERNEL_LOG = ReadingPlan(sections=frozenset({"kernel_log"}))


def test_forms_of_the_line(tmp_path):
    """Without the time since the start there is no age, and no log is an absence."""
    forms = ("0000:03:00", "PCI:0000:03:00", "PCI:0000:03:00.0")
    texts = [f"NVRM: Xid ({form}): 14, Channel 00000001" for form in forms]
    texts += [f"nvidia 0000:03:00.0: {texts[0]}"]
    tree(tmp_path, {"/dev/kmsg": "".join(f"4,1,1000000,-;{text}\n" for text in texts)})
    xids = read_kernel_log(System(root=tmp_path), PLAN_KERNEL_LOG).xids
    assert [(xid.bus_id, xid.code, xid.text, xid.age_s) for xid in xids] == [
        ("0000:03:00.0", 14, "Channel 00000001", None)
    ] * 4
    with pytest.raises(NotRead) as missing:
        read_kernel_log(System(root=tmp_path / "none"), PLAN_KERNEL_LOG)
    assert missing.value.unread.why is Why.ABSENT


def test_a_log_that_is_denied_says_how_it_is_granted():
    """The kernel's own refusal: dmesg_restrict, to a process without CAP_SYSLOG."""
    setpriv = shutil.which("setpriv")
    restricted = System().text_or("/proc/sys/kernel/dmesg_restrict") == "1" and System().exists("/dev/kmsg")
    if os.geteuid() != 0 or setpriv is None or not restricted:
        pytest.skip("needs root, setpriv and kernel.dmesg_restrict=1")
    code = (
        "from ddpdoctor.collect.system import System\n"
        "from ddpdoctor.collect.kernel import read_log\n"
        "from ddpdoctor.model.reading import NotRead\n"
        "try:\n    read_log(System()); print('read')\n"
        "except NotRead as missing:\n    print(missing.unread.why.value, missing.unread.reason)\n"
    )
    drop = [setpriv, "--reuid", "65534", "--clear-groups", "--bounding-set", "-all", "--inh-caps", "-all"]
    ran = subprocess.run([*drop, sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    if ran.returncode != 0:
        pytest.skip(f"another user cannot run this Python: {ran.stderr[-200:]}")
    assert ran.stdout.startswith("denied ")
    assert GRANT in ran.stdout


PLAN_NAMES = ReadingPlan(sections=frozenset({"names"}))


def test_the_master_and_the_head_are_looked_up():
    system = shared_machine("nvlink8", env={"MASTER_ADDR": "dgx07", "MASTER_PORT": "29500"})
    names = read_names(system, ReadingPlan(sections=frozenset({"names"}), head="dgx01"))
    assert (names.master.name, names.master.addresses) == ("dgx07", ())
    assert names.master.error == "not recorded: resolve dgx07"
    assert names.head.addresses == ("10.0.0.11",)


class DeadServer(SystemCalls):
    """Calls of which none answers that would ask a name server."""

    def __init__(self):
        self.never = threading.Event()

    def resolve(self, name):  # noqa: ARG002 - the protocol's
        self.never.wait()
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    def reverse(self, address):
        return self.resolve(address)[0]

    def fqdn(self):
        return self.resolve("")[0]


def test_a_dead_name_server_costs_two_seconds_once():
    calls = DeadServer()
    names = read_names(System(env={"MASTER_ADDR": "node0"}, calls=calls), PLAN_NAMES)
    assert (names.own.timed_out, names.own.error, names.fqdn) == (True, "no answer within 2 s", None)
    assert names.master.timed_out
    calls.never.set()


# NCCL's files, read as NCCL reads them: src/misc/param.cc, and the releases run under strace.


PLAN_VARIABLES = ReadingPlan(sections=frozenset({"conf_files"}))


def read_variables(files, home="/home/ann", **env):
    with TemporaryDirectory() as folder:
        return read_conf_files(tree(Path(folder), files, {"HOME": home, **env}, home=home), PLAN_VARIABLES)


def variables(text):
    """Return what is read of the text of the machine's file."""
    (file,) = read_variables({"/etc/nccl.conf": text})
    return f"{file.variables}, bad lines {file.bad_lines}, repeated {file.repeated_lines}"


INFO, WARN = "NCCL_DEBUG=INFO\n", "NCCL_DEBUG=WARN\n"
USERS = "/home/ann/.nccl.conf"
test_rows = table("machines", globals())


# What is seen of a lock file: its age, who has it open or locked, and whom it names.


NOBODY: frozenset[int] = frozenset()
ENDED = 2**22 + 1
"""Above the greatest number that Linux gives to a process."""


def test_a_file_says_how_old_it_is_and_whom_it_names(tmp_path):
    lock = tmp_path / "lock"
    path = str(lock)
    assert read_lock_file(path, LockKind.MARKER, (), NOBODY) == LockFile(path=path, kind=LockKind.MARKER, exists=False)
    own, other = os.uname().nodename, "some-other-host"
    told = {
        f"{ENDED}\n{own}\n": (ENDED, False, None), f"pid: {os.getpid()}\n": (os.getpid(), True, None),
        f"{ENDED}\n{other}\n": (ENDED, None, other),
        **dict.fromkeys(("", "node0", "2024-01-01", "1732291200.25", "\x00\xff"), (None, None, None)),
    }  # fmt: skip
    for text, named in told.items():
        lock.write_text(text)
        os.utime(lock, (0, lock.stat().st_mtime - 3600))
        found = read_lock_file(path, LockKind.MARKER, (), NOBODY)
        assert (found.exists, found.holders, found.unseen) == (True, (), 0)
        assert (found.named_pid, found.named_lives, found.named_host) == named, text
        assert 3600 <= found.age_s < 3700
    lock.unlink()
    os.mkfifo(lock)
    assert read_lock_file(path, LockKind.OWN_LOOP, (), NOBODY).named_pid is None


def test_who_has_it_open_holds_it_unless_it_polls_itself(tmp_path):
    lock = tmp_path / "lock"
    with lock.open("w"):
        held = read_lock_file(str(lock), LockKind.MARKER, (), NOBODY)
        polled = read_lock_file(str(lock), LockKind.MARKER, (), frozenset({os.getpid()}))
    assert [owner.pid for owner in held.holders] == [os.getpid()]
    assert polled.holders == ()


def test_a_lock_on_another_device_is_on_another_file_of_the_same_inode(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    seen = lock.stat()

    def is_held(device):
        line = LockLine(number=1, waits=False, kind="flock", pid=os.getpid(), file=(device, seen.st_ino))
        return bool(read_lock_file(str(lock), LockKind.KERNEL, (line,), NOBODY).holders)

    assert [is_held(device) for device in (seen.st_dev, os.makedev(0, 9999), os.makedev(250, 9))] == [True, True, False]


def test_a_lock_of_the_kernel_is_recognized_by_its_holder(tmp_path):
    lock = tmp_path / "lock"
    code = (
        "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.flock(f,fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = read_lock_files({1: {"lock": {"path": str(lock), "kind": "kernel"}}}, read_locks())
        other.communicate()
    assert [owner.pid for owner in found[1].holders] == [other.pid]
    with lock.open("w") as free:
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_answer_says_what_is_polled_for():
    marker = {"path": "/x", "kind": "marker"}
    answers = ({}, {"lock": marker}, {"lock": {**marker, "kind": "new"}}, {"lock": {"path": 7}}, {"lock_path": "/x"})
    kinds = (LockKind.KERNEL, LockKind.MARKER, LockKind.KERNEL, LockKind.KERNEL, LockKind.KERNEL)
    assert [lock_of(answer) for answer in answers] == [*zip((None, "/x", "/x", None, "/x"), kinds, strict=True)]


# Istio's proxy is seen by the sockets that it listens on, from any container of the pod.


def test_istios_proxy_is_seen_by_both_its_ports_over_either_protocol(tmp_path):
    assert not has_mesh_proxy(System(root=tmp_path / "nothing"))
    assert [has_mesh_proxy(shared_machine("k8s-pod", *states)) for states in ((), ("istio",))] == [False, True]
    system = load_machine("k8s-pod", tmp_path, "istio")
    table = system.path("/proc/net/tcp")
    table.rename(table.with_name("tcp6"))
    assert has_mesh_proxy(system)
    table.with_name("tcp6").write_text("\n".join(table.with_name("tcp6").read_text().splitlines()[:2]))
    assert not has_mesh_proxy(system)
    assert not has_mesh_proxy(System())
    with socket.create_server(("127.0.0.1", 15001)), socket.create_server(("127.0.0.1", 15006)):
        assert has_mesh_proxy(System())


def test_what_is_asked_side_by_side_answers_fails_or_is_left_and_a_defect_is_raised():
    def fail():
        raise OSError(-2, "Name or service not known")

    forever = threading.Event()
    asked = {"hangs": forever.wait, "too": forever.wait, "good": lambda: 7, "bad": fail}
    replies = ask_side_by_side(asked, 1.0)
    assert {name: reply.timed_out for name, reply in replies.items()} == {
        "hangs": True, "too": True, "good": False, "bad": False,
    }  # fmt: skip
    assert replies["good"].value == 7
    assert replies["bad"].error.strerror == "Name or service not known"
    assert replies["hangs"].duration_s >= 0.9
    forever.set()
    with pytest.raises(ZeroDivisionError):
        ask_side_by_side({"defect": lambda: 1 // 0}, 5.0)


test_words = words(__name__, cuda_of_wheel=lambda row: cuda_of_wheel(*row), master_name=master_name)
