"""What a rank's process shows of the reason for which it stands still or died: sentences, and what to do."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import (
    AtError,
    Blocked,
    DeviceMemory,
    FileLock,
    HostCauses,
    LockFile,
    LockKind,
    LostChild,
    Memory,
    Owner,
    ProcessCauses,
    Space,
)
from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.node import KernelView, Xid
from ddpdoctor.model.stacks import Frame
from ddpdoctor.rules.engine import order_findings, pick_verdict
from ddpdoctor.rules.progress.job_state import JobState
from ddpdoctor.rules.registry import PAGES, all_rules, find_rule, rule
from tests.rules.build import (
    LOCK,
    NOW,
    QUEUE,
    S,
    call,
    crashed,
    ended,
    error,
    in_call,
    in_user,
    job,
    killed,
    line,
    sample,
    stack,
)
from tests.rules.environment.build import node

GIB = 2**30
STDLIB = "/usr/lib/python3.11"
TORCH = "/usr/lib/python3/site-packages/torch"
SITE = "/usr/lib/python3/site-packages"


def lib(path, function="run"):
    return Frame(file=path, line=1, function=function, user=False)


PDB = (lib(f"{STDLIB}/pdb.py", "interaction"), lib(f"{STDLIB}/cmd.py", "cmdloop"))
DYNAMO = lib(f"{TORCH}/_dynamo/convert_frame.py", "_compile")
COMPILED = lib(f"{TORCH}/_dynamo/eval_frame.py", "_fn")
BATON = lib(f"{TORCH}/utils/file_baton.py", "wait")
FILELOCK = lib(f"{SITE}/filelock/_api.py", "acquire")
SUBPROCESS = lib(f"{STDLIB}/subprocess.py", "wait")
SOCKET = lib(f"{STDLIB}/socket.py", "readinto")
POLL = Blocked(call="poll")
SLEEP = Blocked(call="clock_nanosleep")
FUTEX = Blocked(call="futex")
HELD = FileLock(path="/data/cache.lock", kind="flock", holder_pid=1000, holder="python train.py")
ETL = Owner(pid=9, command="etl")
LEFT = LockFile(path="/x/lock", kind=LockKind.MARKER, exists=True, age_s=3 * 3600.0)
FOREIGN = FileLock(path="/data/cache.lock", kind="flock", holder_pid=None, holder="")
THREAD = stack(line(31, "upload"), LOCK, main=False, thread="uploader")

STUCK = {
    "a debugger's prompt": (PDB, {"blocked": Blocked(call="read", fd=0, file="pipe", alone_on_fd0=True)},
        "waits for input in a debugger or console (pdb.py)", "breakpoint"),
    "a script that a debugger runs, and not its prompt": ((lib(f"{STDLIB}/bdb.py", "run"),), {"blocked": SLEEP},
        "is in", "raise --hang-timeout"),
    "input": ((), {"blocked": Blocked(call="read", fd=0, file="/dev/pts/1", alone_on_fd0=True)},
        "waits for input on stdin (/dev/pts/1)", "input()"),
    "input, by readline": ((), {"blocked": Blocked(call="pselect6", alone_on_fd0=True)},
        "waits for input on stdin", "input()"),
    "a read of another file": ((),
        {"blocked": Blocked(call="read", fd=7, file="/data/x")}, None, "raise --hang-timeout"),
    "compiles": ((DYNAMO,), {}, "compiles (convert_frame.py, _compile)", "TORCHINDUCTOR_CACHE_DIR"),
    "runs what was compiled": ((COMPILED,), {}, None, "raise --hang-timeout"),
    "builds an extension": ((lib(f"{TORCH}/utils/cpp_extension.py", "_run_ninja_build"), SUBPROCESS),
        {"commands": ((77, "/usr/bin/ninja -v"),)},
        "compiles (cpp_extension.py, _run_ninja_build), running /usr/bin/ninja -v (process 77)",
        "TORCH_EXTENSIONS_DIR"),
    "a baton that was left": ((lib(f"{TORCH}/utils/cpp_extension.py", "load"), BATON),
        {"blocked": SLEEP, "lock_path": "/root/.cache/x/lock"}, "waits for /root/.cache/x/lock to be removed",
        "delete /root/.cache/x/lock"),
    "a lock of another rank": ((), {"blocked": Blocked(call="flock", fd=3), "waits_for_lock": HELD},
        "waits for the lock on /data/cache.lock; rank 0 (process 1000) holds it", "release the lock in rank 0"),
    "a lock of another process": ((), {"waits_for_lock": FileLock(path=None, kind="fcntl", holder_pid=9, holder="etl")},
        "waits for a lock on a file; process 9 (etl) holds it", "release the lock in process 9"),
    "a lock of another host": ((), {"waits_for_lock": FOREIGN},
        "a process on another host or in another container holds it", "release the lock"),
    "polls for a lock of another rank": ((FILELOCK,), {"lock_path": HELD.path, "locks_of_others": (HELD,)},
        "waits for the lock on /data/cache.lock; rank 0", "release the lock in rank 0"),
    "polls for a lock that nobody here holds": ((FILELOCK,),
        {"lock_path": "/data/other.lock", "locks_of_others": (HELD,)},
        "polls for the lock file /data/other.lock; no process of this job holds a lock on it", "another job or host"),
    "polls for a lock of another job": ((FILELOCK,), {"lock_path": "/data/c.lock", "lock_file": LockFile(
        path="/data/c.lock", kind=LockKind.KERNEL, exists=True, holders=(ETL,))},
        "waits for the lock on /data/c.lock; process 9 (etl) holds it", "release the lock in process 9"),
    "a marker whose owner builds": ((BATON,), {"lock_file": replace(LEFT, holders=(ETL,))},
        "waits for lock file /x/lock to be removed; process 9 (etl) has it open", "check what process 9 is doing"),
    "a marker of a rank": ((BATON,), {"lock_file": replace(LEFT, holders=(Owner(pid=1000, command="python"),))},
        "rank 0 (process 1000) has it open", "check what rank 0 is doing"),
    "a marker that was left behind": ((BATON,), {"lock_file": LEFT},
        "no visible process has it open; it is 3 h old: its owner exited without removing it", "`rm /x/lock`"),
    "a marker that names who has ended": ((), {"lock_file": replace(LEFT, named_pid=5, named_lives=False)},
        "has it open, and process 5, which it names, is gone", "`rm /x/lock`"),
    "a marker that names who lives": ((), {"lock_file": replace(LEFT, named_pid=5, named_lives=True)},
        "the file names process 5", "check what process 5 is doing"),
    "a marker on a network file system": ((BATON,), {"lock_file": replace(LEFT, shared=True)},
        "it is unknown whether its owner is alive: it is on a network file system", "if no process uses it anymore"),
    "a marker that names another host": ((BATON,), {"lock_file": replace(LEFT, named_pid=5, named_host="node7")},
        "it is unknown whether its owner is alive: it names a process on node7", "if no process uses it anymore"),
    "a marker of a user who cannot be looked into": ((BATON,), {"lock_file": replace(LEFT, unseen=2)},
        "2 processes of its owner could not be inspected", "if no process uses it anymore"),
    "a marker that is gone": ((BATON,), {"lock_file": LockFile(path="/x/lock", kind=LockKind.MARKER, exists=False)},
        None, "raise --hang-timeout"),
    "another rank holds a lock that nobody waits for": ((), {"blocked": SLEEP, "locks_of_others": (HELD,)},
        "is in time.sleep", "raise --hang-timeout"),
    "a child that was killed": ((QUEUE,), {"lost_children": (LostChild(pid=5, name="worker", signal="SIGKILL"),)},
        "its child 5 (worker) was killed by SIGKILL", "why that process ended"),
    "a child that left with an error": ((QUEUE,),
        {"lost_children": (LostChild(pid=5, name="", exit_code=3, reaped=True),)},
        "its child 5 exited with status 3", "why that process ended"),
    "children that a loader has ended as usual": ((QUEUE,), {"lost_children": (
        LostChild(pid=5, name="", exit_code=0, reaped=True), LostChild(pid=6, name="", signal="SIGTERM", reaped=True))},
        None, "raise --hang-timeout"),
    "a dead child that it does not wait for": ((), {"lost_children": (LostChild(pid=5, name="w", signal="SIGKILL"),)},
        None, "raise --hang-timeout"),
    "a command": ((SUBPROCESS,), {"blocked": Blocked(call="wait4"), "commands": ((8, "rsync -a /a /b"),)},
        "waits for the command `rsync -a /a /b` (process 8)", "timeout=60"),
    "a command that runs beside": ((), {"blocked": SLEEP, "commands": ((8, "tensorboard"),)}, "is in", "raise --hang"),
    "a server of files": ((), {"kernel_function": "nfs_wait_bit_killable", "blocked": Blocked(
        call="openat", file=None)},
        "waits in the kernel for the NFS server (nfs_wait_bit_killable)", "NFS file system responds"),
    "a request": ((SOCKET,), {"blocked": Blocked(call="recvfrom", fd=5, file="socket", remote="93.184.0.1:443")},
        "waits on the network in socket.py, readinto, for 93.184.0.1:443", "give the request a timeout"),
    "a key of the store": ((), {"blocked": Blocked(call="poll", fd=5, file="socket", remote="127.0.0.1:29500"),
        "store_port": 29500}, "waits for a reply from the job's store (127.0.0.1:29500)", "store.get"),
    "another server, without a library": ((), {"blocked": Blocked(call="recvfrom", fd=5, remote="10.0.0.1:6379"),
        "store_port": 29500}, "waits for data from 10.0.0.1:6379", "raise --hang-timeout"),
    "sleeps": ((), {"blocked": SLEEP}, "is in time.sleep or another C sleep", "raise --hang-timeout"),
    "nothing could be read": ((), {}, None, "raise --hang-timeout"),
}  # fmt: skip


def stuck(frames=(), threads=(), **causes):
    found = ProcessCauses(**causes)
    samples = (sample(stack(line(40), line(12, "load"), *frames), *threads),)
    return judge(job(in_call(0), in_user(1, samples=samples, causes=found), in_call(2))).findings[0]


@pytest.mark.parametrize("name", STUCK)
def test_the_cause_of_a_stuck_rank_is_named(name):
    frames, causes, said, fix = STUCK[name]
    finding = stuck(frames, **causes)
    assert (finding.kind, finding.ranks) == ("stuck", (1,))
    reported = [text for text in finding.evidence if text.startswith("rank 1: ")]
    assert said in reported[0] if said else not reported, finding.evidence
    assert fix in finding.fix, finding.fix


def test_a_futex_names_the_other_threads_and_nobody_where_there_is_none():
    assert "rank 1: sleeps until another thread wakes it (futex); its other threads: uploader (train.py:31)" in (
        stuck(threads=(THREAD,), blocked=FUTEX).evidence
    )
    assert not [text for text in stuck(blocked=FUTEX).evidence if text.startswith("rank 1: ")]


FREES = {
    "it holds the GIL": ("destroy_process_group", False, FUTEX, True),
    "another thread got the GIL": ("destroy_process_group", True, FUTEX, False),
    "it sleeps": ("destroy_process_group", False, SLEEP, False),
    "its last call was another": ("barrier", False, FUTEX, False),
}


@pytest.mark.parametrize("name", FREES)
def test_a_rank_that_frees_its_process_group_with_the_gil_held_is_done(name):
    op, answered, blocked, frees = FREES[name]
    causes = ProcessCauses(blocked=blocked)
    last = (call(op, open_=False),)
    alone = in_user(
        1, recent_calls=last, answered=answered, causes=causes, samples=(sample(stack(line(40)), by="signal"),)
    )
    (finding,) = judge(job(ended(0), alone, ended(2), now_ns=NOW + 1000 * S)).findings
    assert (finding.kind, finding.ranks) == ("stuck", (1,))
    assert any("freeing its process group; it holds the GIL" in text for text in finding.evidence) == frees
    assert ("`del model`" in finding.fix) == frees


def test_a_rank_that_compiles_with_cpus_at_work_is_not_stopped():
    samples = (sample(stack(line(12), DYNAMO)),)

    def judged(busy):
        held = in_user(1, samples=samples, causes=ProcessCauses(busy_cores=busy))
        return judge(job(in_call(0), held, in_call(2)))

    assert (judged(0.0).certain, judged(0.0).findings[0].confidence) == (True, Confidence.HIGH)
    assert (judged(1.7).certain, judged(1.7).findings[0].confidence) == (False, Confidence.MEDIUM)


def polling(number, file, **more):
    return in_user(
        number, line(12, "load"), BATON, initialized=False, groups=(), causes=ProcessCauses(lock_file=file), **more
    )


def test_all_that_poll_for_a_lock_that_was_left_behind_are_stuck_before_their_group_is_made():
    judged = judge(job(*(polling(n, LEFT) for n in range(3))))
    (finding,) = judged.findings
    assert (finding.kind, finding.ranks, finding.confidence) == ("stuck", (0, 1, 2), Confidence.HIGH)
    assert judged.certain


OWNED = {
    "it names a process that lives": replace(LEFT, named_pid=5, named_lives=True),
    "another host may own it": replace(LEFT, shared=True),
    "not all can be looked into": replace(LEFT, unseen=1),
    "it names another host": replace(LEFT, named_pid=5, named_host="node7"),
    "it is gone": replace(LEFT, exists=False),
    "the kernel keeps it": replace(LEFT, kind=LockKind.KERNEL),
    "no lock file is known": None,
}


@pytest.mark.parametrize("name", OWNED)
def test_before_their_group_is_made_nobody_is_named_whose_lock_may_be_given_back(name):
    assert judge(job(*(polling(n, OWNED[name]) for n in range(3)))).findings == ()


HELD_OUTSIDE = {
    "a marker that is open": {"lock_file": replace(LEFT, holders=(ETL,))},
    "a lock that is asked for again and again": {"lock_file": replace(LEFT, kind=LockKind.KERNEL, holders=(ETL,))},
    "a lock that the kernel has them wait for": {
        "waits_for_lock": FileLock(path="/x/lock", kind="fcntl", holder_pid=9, holder="etl")
    },
}


@pytest.mark.parametrize("name", HELD_OUTSIDE)
def test_a_lock_of_another_job_is_reported_in_time_and_nobody_is_stopped(name):
    def judged(since_ns):
        causes = ProcessCauses(**HELD_OUTSIDE[name])
        more = {"initialized": False, "groups": (), "causes": causes, "last_progress_ns": NOW - since_ns}
        return judge(job(*(in_user(n, line(12, "load"), FILELOCK, **more) for n in range(3))))

    assert judged(39 * S).findings == ()
    late = judged(41 * S)
    (finding,) = late.findings
    assert (finding.ranks, finding.confidence, late.certain) == ((0, 1, 2), Confidence.MEDIUM, False)
    assert "; process 9 (etl) h" in finding.evidence[0]


def test_nobody_is_named_while_one_rank_builds_and_the_others_poll():
    builder = in_user(0, initialized=False, groups=())
    assert judge(job(builder, polling(1, LEFT), polling(2, LEFT))).findings == ()


def test_a_loop_of_the_scripts_own_is_less_sure():
    (finding,) = judge(job(*(polling(n, replace(LEFT, kind=LockKind.OWN_LOOP)) for n in range(3)))).findings
    assert finding.confidence is Confidence.MEDIUM


def test_what_several_ranks_share_is_reported_once():
    causes = ProcessCauses(blocked=SLEEP)
    samples = (sample(stack(line(12, "load"))),)
    finding = judge(job(*(in_user(n, samples=samples, causes=causes) for n in range(3)))).findings[0]
    assert finding.evidence[0] == "ranks 0-2: is in time.sleep or another C sleep"


def died(rank, *, group=None, machine=None, shared=None):
    causes = HostCauses(group=group, machine=machine, shared_memory=shared)
    return judge(job(rank, in_call(1), in_call(2), ended=True, host_causes=causes)).findings[0]


def space(limit, used):
    return Space(limit_bytes=int(limit * GIB), used_bytes=int(used * GIB))


def raised(kind, message, causes=None):
    frames = (line(40), line(7, "parse"))
    return crashed(0, error(kind, message, frames=frames), causes=causes)


USED = ProcessCauses(
    memory=Memory(used_bytes=61 * GIB, most_bytes=61 * GIB),
    children_memory=Memory(used_bytes=12 * GIB, most_bytes=12 * GIB),
    children_count=8,
)
AT_LIMIT = ProcessCauses(at_error=AtError(memory=Memory(used_bytes=GIB, most_bytes=GIB), address_space=space(4, 3.5)))
ON_GPU = ProcessCauses(
    at_error=AtError(
        devices=(
            DeviceMemory(
                device=0, allocated_bytes=60 * GIB, most_allocated_bytes=62 * GIB, reserved_bytes=78 * GIB,
                most_reserved_bytes=78 * GIB,
            ),
        )
    )
)  # fmt: skip
CPU_TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12"
SHM_TEXT = "unable to write to file </torch_77_1_2>: No space left on device (28)"
BUS_TEXT = "DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that ... shared memory"
DEAD = {
    "killed by the OOM killer, in a cgroup": (
        killed(0, oom_killed=True, causes=USED), {"group": space(64, 63), "machine": space(512, 200)},
        ("rank 0: used 61.0 GiB when last measured, of the 64.0 GiB that its cgroup allows; its 8 child "
        "processes used 12.0 GiB"), "less memory"),
    "killed by the OOM killer, without a cgroup": (
        killed(0, oom_killed=True, causes=USED), {"machine": space(64, 63)}, "that the machine has", "less memory"),
    "killed, nobody knows by whom, memory full": (
        killed(0, oom_killed=None, causes=USED), {"machine": space(64, 63)}, "used 61.0 GiB", "less memory"),
    "killed, nobody knows by whom, memory free": (
        killed(0, oom_killed=None, causes=USED), {"machine": space(512, 80)}, None, "find out who sent the signal"),
    "killed, and not by the OOM killer": (
        killed(0, oom_killed=False, causes=USED), {"machine": space(64, 63)}, None, "find out who sent the signal"),
    "a bus error with a full /dev/shm": (
        killed(0, "SIGBUS"), {"shared": space(0.0625, 0.0625)}, "/dev/shm had 64 MiB of 64 MiB in use: it was full",
        "--shm-size"),
    "a bus error with room in /dev/shm": (
        killed(0, "SIGBUS"), {"shared": space(16, 1)}, "it may have been full between measurements", "native code"),
    "a limit of addresses": (
        raised("RuntimeError", CPU_TEXT, AT_LIMIT), {"machine": space(64, 5)},
        "its address space was 3.5 GiB of the 4.0 GiB that RLIMIT_AS (ulimit -v) allows, and it asked for 8.0 GiB more",
        "ulimit -v"),
    "a MemoryError of which nothing was noted": (raised("MemoryError", ""), {}, None, "fix the error"),
    "a GPU that is full": (
        raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB.", ON_GPU), {},
        "on GPU 0, tensors used 60.0 GiB (peak 62.0 GiB), and torch had reserved 78.0 GiB (peak 78.0 GiB)",
        "expandable_segments"),
    "a loader worker and a full /dev/shm": (
        raised("RuntimeError", BUS_TEXT), {"shared": space(0.0625, 0.0625)}, "it was full", "--shm-size"),
    "a loader worker that the OOM killer ended": (
        raised("RuntimeError", "DataLoader worker (pid 77) is killed by signal: Killed.", USED),
        {"group": space(64, 64)}, "its 8 child processes used 12.0 GiB", "less memory"),
    "a tensor that did not fit into /dev/shm": (
        raised("RuntimeError", SHM_TEXT, ProcessCauses(at_error=AtError(shared_memory=space(0.0625, 0.0615)))), {},
        "it was full", "--shm-size"),
    "a tensor larger than all of /dev/shm": (
        raised("RuntimeError", SHM_TEXT, ProcessCauses(at_error=AtError(shared_memory=space(0.0625, 0)))), {},
        "/dev/shm had 0 MiB of 64 MiB in use: there was no space for the request", "--shm-size"),
    "an error that speaks of something else": (
        raised("ValueError", "shape mismatch", USED), {"machine": space(64, 63)}, None, "fix the error"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEAD)
def test_a_rank_that_died_of_memory_says_what_was_measured(name):
    rank, host, said, fix = DEAD[name]
    finding = died(rank, **host)
    assert finding.kind in {"killed", "crash"}
    reported = [text for text in finding.evidence if text.startswith("rank 0: ")]
    assert any(said in text for text in reported) if said else not reported, finding.evidence
    assert fix in finding.fix, finding.fix


ECC = raised("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")
FAULT = "a memory error that ECC could not correct"
DRIVER = {
    "of this process": (
        ECC, (48, "pid=1000, name=python, Ch 8", 30.0), f"has Xid 48 of this process, at the GPU 0000:1b:00.0: {FAULT}",
        "nvidia-smi -r -i 0000:1b:00.0"),
    "of no process": (
        ECC, (79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", 30.0), "Xid 79 of no process",
        "reboot"),
    "of a pid that no rank has, as in a container": (
        ECC, (48, "pid='88123', name=python", 30.0), "Xid 48 of process 88123", "exclude the host"),
    "a program's fault": (
        raised("AcceleratorError", "CUDA error: an illegal memory access was encountered"),
        (31, "pid=1000, name=python, Ch 8", 30.0), "Xid 31 of this process", "CUDA_LAUNCH_BLOCKING=1"),
    "an abort in a thread of C++": (killed(0, "SIGABRT"), (79, "pid=1000, name=python", 30.0), "Xid 79", "reboot"),
    "another rank's": (ECC, (48, "pid=1001, name=python", 30.0), None, "exclude the host"),
    "before this job": (ECC, (48, "pid=1000, name=python", 5e5), None, "exclude the host"),
    "at an unknown time": (ECC, (48, "pid=1000, name=python", None), None, "exclude the host"),
    "a program's fault of another process": (ECC, (31, "pid=88123, name=python", 30.0), None, "exclude the host"),
    "an abort, and a fault of no process": (
        killed(0, "SIGABRT"), (79, "pid='<unknown>'", 30.0), None, "native code"),
    "an error that is no device's": (raised("ValueError", "bad"), (48, "pid=1000", 30.0), None, "fix the error"),
}  # fmt: skip


@pytest.mark.parametrize("name", DRIVER)
def test_a_device_that_was_lost_has_the_drivers_words_of_the_kernels_log(name):
    rank, (code, text, age_s), said, fix = DRIVER[name]
    xid = Xid(bus_id="0000:1b:00.0", code=code, text=text, age_s=age_s)
    machine = node("node0", kernel_log=KernelView(xids=(xid,)))
    finding = judge(job(rank, in_call(1), in_call(2), ended=True, machine=machine)).findings[0]
    reported = [one for one in finding.evidence if "Xid" in one]
    assert all(said in one for one in reported) if said else not reported, finding.evidence
    assert bool(reported) is bool(said)
    assert fix in finding.fix, finding.fix


# The verdict is the one finding to act on first.


RULES = {rule.kind: rule for rule in all_rules()}


def found(code, severity=Severity.ERROR, step=None, confidence=Confidence.HIGH):
    return Finding(code=code, kind=code, severity=severity, confidence=confidence, summary="", step=step)


WARNING, INFO = Severity.WARNING, Severity.INFO
TABLE = {
    "nothing": ([], None),
    "an info is none": ([found("DD612", INFO)], None),
    "a warning before an info": ([found("DD612", INFO), found("DD610", WARNING)], "DD610"),
    "an error before a warning": ([found("DD502", WARNING, 0), found("DD501", step=9)], "DD501"),
    "the root of a hang before earlier steps": ([found("DD501", step=1), found("DD601", step=9)], "DD601"),
    "the earliest step first": ([found("DD504", step=5), found("DD501", step=2)], "DD501"),
    "within a step the number that spreads": ([found(c, step=2) for c in ("DD505", "DD501", "DD503")], "DD503"),
    "a non-finite gradient first": ([found("DD503", step=2), found("DD504", step=2)], "DD504"),
    "data before the other warnings": ([found("DD502", WARNING), found("DD702", WARNING)], "DD702"),
    "a name before the connections that fail by it": ([found("DD220"), found("DD219"), found("DD207")], "DD207"),
    "what keeps a job from starting before what spoils it": ([found("DD104"), found("DD129"), found("DD220")], "DD220"),
    "the node that is absent before a start that fails": ([found("DD221"), found("DD233")], "DD233"),
    "the surer one": ([found("DD608", confidence=Confidence.LOW), found("DD601")], "DD601"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_verdict(name):
    findings, code = TABLE[name]
    verdict = pick_verdict(findings)
    assert (verdict.code if verdict is not None else None) == code
    assert pick_verdict(reversed(findings)) == verdict


def test_order_keeps_all():
    findings = [found("DD612", INFO), found("DD601"), found("DD702", WARNING)]
    assert [f.code for f in order_findings(findings)] == ["DD601", "DD702", "DD612"]


def test_what_a_rule_comes_after_is_a_rule_and_no_circle():
    def depth(kind, seen=()):
        assert kind not in seen, seen
        return max((depth(before, (*seen, kind)) + 1 for before in RULES[kind].after), default=0)

    assert max(map(depth, RULES)) > 10


STARTING = (
    "DD205", "DD206", "DD208", "DD207", "DD204", "DD231", "DD232", "DD216", "DD219", "DD235", "DD234", "DD233", "DD202",
    "DD211", "DD212", "DD201", "DD203", "DD213", "DD220", "DD215", "DD221",
)  # fmt: skip
BENCH, NUMBERS = ("DD401", "DD402", "DD403", "DD404", "DD405"), ("DD504", "DD503", "DD501", "DD505", "DD701", "DD502")


@pytest.mark.parametrize("codes", [STARTING, BENCH, NUMBERS])
def test_the_order_that_rules_declare(codes):
    findings = [found(code) for code in reversed(codes)]
    assert tuple(finding.code for finding in order_findings(findings)) == codes


# Codes and kinds are used once, and every rule has a page.


CODES = {
    "DD601": "stuck", "DD602": "mismatch", "DD603": "early-exit", "DD604": "crash", "DD605": "killed",
    "DD606": "stopped", "DD607": "missing", "DD608": "deadlock", "DD609": "exit-hang", "DD611": "transport",
    "DD612": "exit-abort", "DD901": "not-recorded",
}  # fmt: skip


def page_less(job: JobState):
    return job


def with_page(job: JobState):
    """A page."""
    return job


def about_nothing(thing: Thing):  # noqa: F821 - the name of no facts that there are
    """A page."""
    return thing


def test_all_rules_are_there_and_sorted():
    known = {r.code: r.kind for r in all_rules()}
    assert {code: known.get(code) for code in CODES} == CODES
    assert list(known) == sorted(known)


PAGE = re.compile(
    r"What it means, How it is recognized(, How sure)?(, What else looks like it)?, What to do(, Example)?"
)


@pytest.mark.parametrize("found", all_rules(), ids=lambda found: found.code)
def test_pages_have_one_form(found):
    assert PAGE.fullmatch(", ".join(re.findall("^## (.*)$", found.page, re.MULTILINE)))
    assert found.page.startswith(("Report ", "Compare ", "Say ", "Note ")), found.page.splitlines()[0]


def test_each_page_is_that_of_a_rule():
    assert {path.stem for path in PAGES.iterdir()} == {found.code for found in all_rules()}


@pytest.mark.parametrize("name", ["DD601", "dd601", "stuck", " stuck "])
def test_a_rule_is_found_by_code_and_kind(name):
    assert find_rule(name).code == "DD601"


def test_an_unknown_rule_is_none():
    assert find_rule("DD999") is None


@pytest.mark.parametrize(("code", "kind"), [("DD601", "new"), ("DD699", "stuck")])
def test_reuse_is_refused(code, kind):
    all_rules()
    with pytest.raises(ValueError, match="taken"):
        rule(code, kind, Severity.ERROR, "again")(with_page)


def test_a_rule_without_a_page_is_refused():
    with pytest.raises(ValueError, match="docstring"):
        rule("DD699", "new", Severity.ERROR, "no page")(page_less)


def test_a_rule_about_facts_that_no_verb_has_is_refused():
    with pytest.raises(ValueError, match="asked about a Thing"):
        rule("DD699", "new", Severity.ERROR, "no such facts")(about_nothing)
