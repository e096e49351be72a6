"""How processes ended, where they stand and what they hung in, by files of /proc and of the run."""

import faulthandler
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ddpdoctor.collect import proc
from ddpdoctor.collect.blocked import (
    HostFacts,
    awaited_lock,
    locks_of_others,
    read_blocked,
    read_causes,
    read_kernel_function,
    read_locks,
)
from ddpdoctor.collect.connections import parse_end, read_connections, read_received, read_rows
from ddpdoctor.collect.kernel import find_stuck, read_stuck_processes
from ddpdoctor.collect.launch import read_identity
from ddpdoctor.collect.launch import read_process as process_facts
from ddpdoctor.collect.limits import read_oom_kills
from ddpdoctor.collect.proc import read_exit_code, read_text
from ddpdoctor.collect.rank import parse_stacks, split_dump
from ddpdoctor.collect.run_files import End, WatchedJob, parse_watch
from ddpdoctor.collect.run_ranks import Source, find_ends, interruption_ns, stop_of_others
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.facts import LostChild
from ddpdoctor.model.reading import NotRead, Why
from ddpdoctor.recorder.storage.ring_layout import RANK_SHAPE, ROLE_RANK
from ddpdoctor.recorder.storage.ring_reading import read_ring_file
from ddpdoctor.recorder.storage.ring_writing import Ring
from tests.golden import Cases, table, words
from tests.machines import RecordedCalls, shared_machine
from tests.scenarios.hosts import require
from tests.scenarios.running import wait_for

# What the main thread of a process sleeps in, by files of /proc that were recorded, and of real processes.


CASES = Cases(__name__)
test_kept = CASES.test()
INPUT, REST = "0 0x0 0x55 0x2000 0x7f 0x0 0x0 0x7ffd 0x7f37", "0x0 0x0 0x0 0x0 0x7ffd 0x7f37"
FDS = {0: "/dev/pts/3", 4: "/data/x.lock", 5: "pipe:[123]"}


def blocked(text, machine="x86_64"):
    """Return what a process is blocked in, by its file syscall."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "7" / "fd").mkdir(parents=True)
        for fd, target in FDS.items():
            (Path(folder) / "7" / "fd" / str(fd)).symlink_to(target)
        (Path(folder) / "7" / "syscall").write_text(text + "\n")
        return read_blocked(7, Path(folder), machine)


def test_a_process_that_has_gone_is_no_error(tmp_path):
    assert (read_blocked(7, tmp_path), read_kernel_function(7, tmp_path), read_locks(tmp_path)) == (None, None, ())
    assert (read_rows(7, tmp_path), read_connections(7, (), tmp_path)) == ((), None)


def start(code, *arguments, **more):
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **more)


def test_the_holder_of_a_lock_and_the_waiter(tmp_path):
    path = tmp_path / "cache.lock"
    with (tmp_path / "database").open("w") as database, path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for byte in range(0, 40, 2):
            fcntl.lockf(database, fcntl.LOCK_EX, 1, byte)  # as a database does: each has its line, before older ones
        waiter = start("import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)", str(path))
        try:
            assert wait_for(lambda: awaited_lock(waiter.pid, read_locks()) is not None)
            found = read_causes(waiter.pid, (), HostFacts(family=frozenset({os.getpid(), waiter.pid})))
            lock = found.waits_for_lock
            assert (lock.path, lock.kind, lock.holder_pid) == (str(path), "flock", os.getpid())
            assert lock.holder.split()[0] == Path("/proc/self/cmdline").read_text().split("\0")[0]
            assert (found.blocked.call, found.blocked.file) == ("flock", str(path))
            others = locks_of_others(waiter.pid, frozenset({os.getpid()}), read_locks())
            assert str(path) in {one.path for one in others}
            assert not locks_of_others(waiter.pid, frozenset(), read_locks())
        finally:
            waiter.kill()
            waiter.wait()


def test_a_wait_for_a_server_has_its_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
        port = server.getsockname()[1]
        client = start(code, str(port))
        try:
            end = f"127.0.0.1:{port}"
            assert wait_for(lambda: (one := read_blocked(client.pid)) is not None and one.remote == end)
            found = read_connections(client.pid, read_rows(client.pid))
            assert found.by_address == (("127.0.0.1", 1),)
            assert not found.stalled
        finally:
            client.kill()
            client.wait()


@pytest.mark.parametrize(
    ("line", "code", "end"),
    [("raise SystemExit(7)", 7, {"exit_code": 7}), ("import os; os.kill(os.getpid(), 9)", -9, {"signal": "SIGKILL"})],
)
def test_how_a_child_ended_is_known_while_it_is_a_zombie(line, code, end):
    child = start(f"input()\n{line}", stdin=subprocess.PIPE)
    ticks = proc.read_process(child.pid).start_ticks
    assert read_exit_code(child.pid, ticks, None) is None
    child.stdin.write(b"\n")
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = proc.read_process(child.pid)
    lost = read_causes(os.getpid(), (zombie,), HostFacts()).lost_children
    assert lost == (LostChild(pid=child.pid, name=zombie.name, **end),)
    assert [read_exit_code(child.pid, ticks + later, None) for later in (0, 1)] == [code, None]
    child.wait()
    assert read_exit_code(child.pid, ticks, None) is None


def test_the_command_of_a_child_hides_its_secrets_and_its_io_is_read():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', '--token', 'abc'])"
    parent = start(code, stdin=subprocess.PIPE)
    try:
        assert wait_for(lambda: len(proc.descendants(parent.pid, proc.read_processes())) == 1)
        (child,) = proc.descendants(parent.pid, proc.read_processes())
        assert {parent.pid, child.pid} <= {one.pid for one in proc.descendants(os.getpid(), proc.read_processes())}
        assert wait_for(lambda: "--token" in proc.read_command(child.pid))
        assert proc.read_command(child.pid).endswith("-c input() --token ***")
        assert wait_for(lambda: (one := read_blocked(child.pid)) is not None and one.alone_on_fd0)
        assert proc.read_io(parent.pid).read > 0
    finally:
        parent.stdin.close()
        parent.wait()


# How processes ended, from what is left of them; and who of those that were asked to end had a launcher ask it.


PID = 100
GONE, MS = 5_000_000_000, 1_000_000
RAISED = {"k": "raised", "uncaught": 1, "main": 1}


def source(pid=PID, **more):
    return Source(pid=pid, rank=0, local_rank=0, world_size=None, **more)


def ended(*notes, pids=(PID,), shell=None, code=None, launcher_status=None, cells=(), **files):
    """Return how a process ended, by its ring, a file that it wrote at a signal, and what the watcher knows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "evidence").mkdir()
        ring = Ring(name, ROLE_RANK, RANK_SHAPE, PID, 7)
        for note in notes:
            ring.note(note)
        for cell in cells:
            ring.set(cell, 1)
        for ending, text in files.items():
            (folder / "evidence" / f"100-7.{ending}").write_text(text)
        rows = {str(pid): {"ended_ns": GONE} | ({} if code is None else {"code": code}) for pid in pids}
        watch = parse_watch({"processes": {} if shell else rows, "launcher_status": launcher_status})
        known = {50: End(pid=50, code=shell, at=GONE)} if shell else {}
        contents = {PID: read_ring_file(ring.path)} if pids == (PID,) else {}
        sources = [source(pid, **({"stands_for": 50} if shell else {})) for pid in pids]
        ends = find_ends(sources, contents, folder, watch, known)
    assert all((end.pid, end.at) == (pid, GONE) for pid, end in ends.items())
    return {pid: end.code for pid, end in ends.items() if pid in pids} or "not known"


def stopped(*seen):
    """Return when the launcher stopped ranks of which each ended after so many ms, with a code."""
    ends = {pid: End(pid=0, code=code, at=GONE + ms * MS) for pid, (ms, code) in enumerate(seen)}
    stop = stop_of_others([source(pid) for pid in ends], ends, WatchedJob())
    return stop and f"stop at {(stop - GONE) // MS}"


def interrupted(ms):
    """Return when all ranks but one were stopped by a signal to the whole group. Nobody interrupted a killed one."""
    ends = {
        pid: End(pid=0, code=code, at=GONE + at * MS) for pid, at, code in ((1, 0, -15), (2, 200, -15), (3, -400, 1))
    }
    seen = {"interrupted_ns": GONE + ms * MS, "processes": {"1": {"ended_ns": GONE - 20 * MS}}}
    assert interruption_ns([source(1)], {1: ends[1]}, WatchedJob()) is None
    return f"stop at {(interruption_ns([source(pid) for pid in ends], ends, parse_watch(seen)) - GONE) // MS}"


# Processes and kernel facts, on this machine and on trees of other machines.


def test_this_process_its_signals_and_a_setting_of_the_kernel() -> None:
    process = proc.read_process(os.getpid())
    assert process is not None
    assert (process.ppid, process.state) == (os.getppid(), "R")
    assert proc.read_process(2**22 + 1) is None
    assert [proc.catches_signal(os.getpid(), one) for one in (signal.SIGINT, signal.SIGURG)] == [True, False]
    assert read_text(Path("/proc/sys/kernel/ostype")) == "Linux\n"


def test_a_name_with_brackets_and_how_long_a_process_and_its_threads_waited_for_a_core(tmp_path: Path) -> None:
    for thread, text in ((7, "5 900 1\n"), (8, "5 0 7\n"), (9, "")):
        (tmp_path / "7" / "task" / str(thread)).mkdir(parents=True)
        (tmp_path / "7" / "task" / str(thread) / "schedstat").write_text(text)
    assert (proc.read_run_delays(7, tmp_path), proc.read_run_delays(1, tmp_path)) == ({7: 900, 8: 0}, {})
    (tmp_path / "7" / "stat").write_text("7 (a) b (c) S 3 " + " ".join(str(n) for n in range(5, 40)))
    process = proc.read_process(7, tmp_path)
    assert process is not None
    assert (process.name, process.ppid, process.start_ticks) == ("a) b (c", 3, 22)
    for text, wanted_ns in (("652581 40283039 2\n", 40_935_620), ("0\n", None)):
        (tmp_path / "7" / "schedstat").write_text(text)
        assert (proc.read_wanted_ns(7, tmp_path), proc.read_wanted_ns(8, tmp_path)) == (wanted_ns, None)


def oom_kills(row):
    """A row has the control groups of a process, and a file of one of them."""
    groups, file, text = row
    with tempfile.TemporaryDirectory() as folder:
        system = System(root=Path(folder))
        for name, written in (("/proc/self/cgroup", groups), (f"/sys/fs/cgroup/{file}", text)):
            system.path(name).parent.mkdir(parents=True)
            system.path(name).write_text(written)
        return read_oom_kills(system)


# Processes that hang in the driver: two looks, and what tells a moment's sleep from a hang.


PLAN = ReadingPlan(sections=frozenset({"stuck_processes"}))


def test_nobody_means_one_look():
    def never(_seconds):
        raise AssertionError("nobody was there to look at again")

    assert find_stuck(shared_machine("nvlink8"), never) == ()


def hangs(row):
    """A row has when a file of the machine changes, which one, and a text in it that becomes another one."""
    when, file, before, after = row
    system = shared_machine("nvlink8", "stuck")
    path = system.path(file)
    text = path.read_text() if path.exists() else None

    def change(_seconds=None):
        assert before in (text or "")
        path.write_text(text.replace(before, after, 1) if before else after)

    try:
        if when == "before":
            change()
        return find_stuck(system, change if when == "between" else lambda seconds: None if seconds == 1.0 else 1 / 0)
    finally:
        path.unlink() if text is None else path.write_text(text)


def test_without_a_driver_there_is_nothing_to_hang_in(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_stuck_processes(System(root=tmp_path), PLAN)
    assert missing.value.unread.why is Why.ABSENT


# What faulthandler writes is read back, on request and for a fatal signal.


FATAL = """Fatal Python error: Segmentation fault

Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f22 [python] (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/u/train.py", line 14 in load
  File "/home/u/train.py", line ??? in <module>

Extension modules: numpy.core._multiarray_umath (total: 1)
"""
ROOTS = ("/usr/lib/python3.11/",)


@CASES
def fatal_dumps():
    """A thread of C++ alone is not the one that was hit, and damaged text gives no stack."""
    before, fatal, struck = split_dump("Thread 0x1 (most recent call first):\n" + FATAL)
    assert split_dump("nothing of note\n") == ("nothing of note\n", "", "")
    return {
        "before it": before, "fatal": parse_stacks(fatal, 0x7F22, ROOTS),
        "the thread that was hit": parse_stacks(struck, 0x7F11, ROOTS),
        "a thread of C++ alone": split_dump(FATAL.replace("Current thread", "Thread"))[2],
        "damaged": parse_stacks("\x00\x01 File nonsense\n  File broken line\n", 1, ROOTS),
    }  # fmt: skip


def test_a_real_dump_of_this_process() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = parse_stacks(file.read(), threading.get_ident(), ROOTS)
    main = next(stack for stack in stacks if stack.is_main)
    assert main.frames[-1].function == "test_a_real_dump_of_this_process"


ABORTS = {
    "a thread of C++ alone, as NCCL's watchdog": """
import ctypes, time
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
time.sleep(60)
""",
    "the main thread": "import os; os.abort()",
}


@pytest.mark.parametrize("who", ABORTS)
def test_a_real_abort_shows_whether_python_sent_it(who: str) -> None:
    program = f"import faulthandler; faulthandler.enable()\n{ABORTS[who]}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    _, fatal, struck = split_dump(done.stderr)
    assert fatal
    assert bool(struck) is (who == "the main thread")


# What the kernel says a connection has received, of both families.


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_bytes_of_a_connection_are_counted(family: socket.AddressFamily, host: str) -> None:
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        sender, _ = server.accept()
        with sender:
            sender.sendall(bytes(12_345))
            left = 12_345
            while left:
                left -= len(client.recv(left))
            port, served = client.getsockname()[1], server.getsockname()[1]
            (found,) = [one for one in read_received() if one.local_port == port]
    assert (found.size_bytes, found.remote.rpartition(":")[2]) == (12_345, str(served))


# Which rank a process is, and where it stands.


IDENTITY = (
    "from ddpdoctor.collect.launch import read_identity as r;"
    "from ddpdoctor.collect.system import System as S;"
    "i = r(S()); print(i.host, i.machine, i.container)"
)


def process_of(env, **known):
    return process_facts(System(env=env, calls=RecordedCalls(answers={"cpus": "0-2"})), **known)


def test_what_the_launch_knows_fills_in():
    assert process_of({}, rank=1, local_rank=0).rank == 1
    assert process_of({"RANK": "6"}, rank=1, local_rank=0).rank == 6


def test_values_of_listed_variables_only():
    process = process_of({"NCCL_DEBUG": "INFO", "NCCL_DEBUGG": "secret", "AWS_SECRET_ACCESS_KEY": "x"})
    assert process.variables["NCCL_DEBUG"] == "INFO"
    assert process.other_names == ("NCCL_DEBUGG",)
    assert "secret" not in repr(process)
    assert "AWS" not in repr(process)


def test_the_facts_of_this_process():
    process = process_facts(System(env={"DDPDOCTOR_RUN": "/x"}))
    assert process.pid == os.getpid()
    assert process.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert process.under_wrap


def identity(*wrapper):
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", IDENTITY], check=True, capture_output=True, text=True, timeout=200
    )
    return done.stdout.split()


def test_processes_of_one_host_are_one_node_and_a_network_of_its_own_makes_another_but_mounts_do_not():
    own = identity()
    assert own == identity()
    require("unshare")
    assert identity("unshare", "--net")[1] != own[1]
    mounts = identity("unshare", "--mount")
    assert (mounts[1] == own[1], mounts[2] == own[2]) == (True, False)


def test_where_there_is_no_proc_the_name_has_to_do(tmp_path):
    mac = System(root=tmp_path, env={}, calls=RecordedCalls(answers={"hostname": "mac"}))
    assert read_identity(mac).machine == "mac//"


def ranks(env):
    process = process_of(env)
    return f"rank {process.rank}, local rank {process.local_rank}"


test_words = words(__name__, ranks=ranks, hangs=hangs, parse_end=parse_end, oom_kills=oom_kills)
test_rows = table("lost_processes", globals())
