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
from ddpdoctor.collect.kernel import find_stuck, read_stuck
from ddpdoctor.collect.launch import read_identity
from ddpdoctor.collect.launch import read_process as process_facts
from ddpdoctor.collect.limits import read_oom_kills
from ddpdoctor.collect.proc import read_exit_code, read_process
from ddpdoctor.collect.rank import parse_stacks, split_fatal, struck_thread
from ddpdoctor.collect.run_files import End, WatchedJob, parse_watch
from ddpdoctor.collect.run_ranks import Source, find_ends, interruption_ns, stop_of_others
from ddpdoctor.collect.system import ReadingPlan, System, read_text
from ddpdoctor.model.facts import Blocked, LostChild
from ddpdoctor.model.node import StuckProcess
from ddpdoctor.model.reading import NotRead, Why
from ddpdoctor.recorder.storage.ring_layout import RANK_SHAPE, ROLE_RANK
from ddpdoctor.recorder.storage.ring_reading import read_ring_file
from ddpdoctor.recorder.storage.ring_writing import Ring
from tests.machines import RecordedCalls, load_machine
from tests.scenarios.hosts import require
from tests.scenarios.running import wait_for

# What the main thread of a process sleeps in, by files of /proc that were recorded, and of real processes.


INPUT = "0 0x0 0x55 0x2000 0x7f 0x0 0x0 0x7ffd 0x7f37"
CALLS = {
    "input": ("x86_64", INPUT, Blocked(call="read", fd=0, file="/dev/pts/3", alone_on_fd0=True)),
    "readline": ("x86_64", "270 0x1 0x7f 0x0 0x0 0x0 0x0 0x7ffd 0x7f37", Blocked(call="pselect6", alone_on_fd0=True)),
    "select of more": ("x86_64", "270 0x9 0x7f 0x0 0x0 0x0 0x0 0x7ffd 0x7f37", Blocked(call="pselect6")),
    "a sleep": ("aarch64", "115 0x0 0x0 0x7f 0x0 0x0 0x0 0x7ffd 0x7f37", Blocked(call="clock_nanosleep")),
    "a lock": ("x86_64", "73 0x4 0x2 0x0 0x0 0x0 0x0 0x7ffd 0x7f37", Blocked(call="flock", fd=4, file="/data/x.lock")),
    "a pipe": ("x86_64", "0 0x5 0x55 0x4 0x0 0x0 0x0 0x7ffd 0x7f37", Blocked(call="read", fd=5, file="pipe")),
    "it runs": ("x86_64", "running", None),
    "outside of a call": ("x86_64", "-1 0x7ffd 0x7f37", None),
    "a call that does not last": ("x86_64", "39 0x0 0x0 0x0 0x0 0x0 0x0 0x7ffd 0x7f37", None),
    "a machine of another kind": ("riscv64", INPUT, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_is_read(name, tmp_path):
    machine, text, expected = CALLS[name]
    folder = tmp_path / "7"
    (folder / "fd").mkdir(parents=True)
    (folder / "syscall").write_text(text + "\n")
    for fd, target in {0: "/dev/pts/3", 4: "/data/x.lock", 5: "pipe:[123]"}.items():
        (folder / "fd" / str(fd)).symlink_to(target)
    assert read_blocked(7, tmp_path, machine) == expected


def test_a_process_that_has_gone_is_no_error(tmp_path):
    assert (read_blocked(7, tmp_path), read_kernel_function(7, tmp_path), read_locks(tmp_path)) == (None, None, ())
    assert (read_rows(7, tmp_path), read_connections(7, (), tmp_path)) == ((), None)


ENDS = {
    "0100007F:733C": "127.0.0.1:29500",
    "0000000000000000FFFF00000400000A:0050": "10.0.0.4:80",
    "000080FE00000000000000000100000A:0016": "[fe80::a00:1]:22",
    "xyz": None,
    "01:0": None,
}


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes words in the machine's own order")
@pytest.mark.parametrize("text", ENDS)
def test_addresses_of_the_kernel(text):
    assert parse_end(text) == ENDS[text]


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
    ("code", "end"), [("import os; os.kill(os.getpid(), 9)", {"signal": "SIGKILL"}), ("exit(3)", {"exit_code": 3})]
)
def test_how_a_child_ended_that_nobody_has_waited_for(code, end):
    child = start(code)
    try:
        assert wait_for(lambda: (one := proc.read_process(child.pid)) is not None and one.state == "Z")
        zombie = proc.read_process(child.pid)
        lost = read_causes(os.getpid(), (zombie,), HostFacts()).lost_children
        assert lost == (LostChild(pid=child.pid, name=zombie.name, **end),)
    finally:
        child.wait()


def test_the_command_of_a_child_hides_its_secrets():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', '--token', 'abc'])"
    parent = start(code, stdin=subprocess.PIPE)
    try:
        assert wait_for(lambda: len(proc.descendants(parent.pid, proc.read_processes())) == 1)
        (child,) = proc.descendants(parent.pid, proc.read_processes())
        assert wait_for(lambda: "--token" in proc.read_command(child.pid))
        assert proc.read_command(child.pid).endswith("-c input() --token ***")
        assert wait_for(lambda: (one := read_blocked(child.pid)) is not None and one.alone_on_fd0)
        assert Path(f"/proc/{child.pid}").exists()
    finally:
        parent.stdin.close()
        parent.wait()


# How processes ended, from what is left of them; and who of those that were asked to end had a launcher ask it.


PID = 100
GONE = 5_000_000_000
MS = 1_000_000


def source(pid=PID, **more):
    return Source(pid=pid, rank=0, local_rank=0, world_size=None, **more)


def recorded(folder, *notes, **cells):
    ring = Ring(str(folder), ROLE_RANK, RANK_SHAPE, PID, 7)
    for note in notes:
        ring.note(note)
    for name, value in cells.items():
        ring.set(name, value)
    return {PID: read_ring_file(folder / f"{PID}-7.ring")}


RAISED = {"k": "raised", "uncaught": 1, "main": 1}


@pytest.mark.parametrize(
    ("notes", "cells", "code"),
    [
        ((), {"main_ended_ns": 1}, 0),
        ((RAISED,), {"main_ended_ns": 1}, 1),
        (({"k": "exit", "status": "3"},), {}, 3),
        (({"k": "exit", "status": "None"},), {}, 0),
        (({"k": "exit", "status": "'no data'"},), {}, 1),
        (({"k": "raised", "uncaught": 0, "main": 1},), {}, None),
        ((), {}, None),
    ],
)
def test_a_process_says_itself_how_it_left(notes, cells, code, tmp_path):
    contents = recorded(tmp_path, *notes, **cells)
    watch = parse_watch({"processes": {str(PID): {"ended_ns": GONE}}})
    ends = find_ends([source()], contents, tmp_path, watch, {})
    assert ends == ({} if code is None else {PID: End(pid=PID, code=code, at=GONE)})


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("100-7.dump", "Fatal Python error: Segmentation fault\n\nThread 0x1", -signal.SIGSEGV),
        ("100-7.dump", "Fatal Python error: Aborted\n", -signal.SIGABRT),
        ("100-7.term", "Stack (most recent call first):\n", -signal.SIGTERM),
    ],
)
def test_what_it_wrote_at_a_signal_shows_which_it_was(file, text, code, tmp_path):
    contents = recorded(tmp_path)
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / file).write_text(text)
    watch = parse_watch({"processes": {str(PID): {"ended_ns": GONE}}})
    assert find_ends([source()], contents, tmp_path, watch, {})[PID].code == code


@pytest.mark.parametrize(("status", "code"), [(137, -9), (-9, -9), (139, -11), (1, None), (0, None), (None, None)])
def test_the_launchers_status_explains_the_one_end_that_nothing_else_does(status, code, tmp_path):
    contents = recorded(tmp_path)
    watch = parse_watch({"processes": {str(PID): {"ended_ns": GONE}}, "launcher_status": status})
    assert find_ends([source()], contents, tmp_path, watch, {}) == (
        {} if code is None else {PID: End(pid=PID, code=code, at=GONE)}
    )


def test_two_ends_that_nobody_saw_stay_unknown(tmp_path):
    watch = parse_watch({"processes": {"100": {"ended_ns": GONE}, "101": {"ended_ns": GONE}}, "launcher_status": 137})
    assert find_ends([source(100), source(101)], {}, tmp_path, watch, {}) == {}


@pytest.mark.parametrize(("status", "code"), [(137, -9), (3, 3)])
def test_a_rank_behind_a_shell_ends_as_the_shell_says(status, code, tmp_path):
    known = {50: End(pid=50, code=status, at=GONE)}
    ends = find_ends([source(stands_for=50)], recorded(tmp_path), tmp_path, WatchedJob(), known)
    assert ends[PID] == End(pid=PID, code=code, at=GONE)


def test_what_the_kernel_said_goes_before_what_was_worked_out(tmp_path):
    contents = recorded(tmp_path, RAISED)
    watch = parse_watch({"processes": {str(PID): {"ended_ns": GONE, "code": -9}}})
    assert find_ends([source()], contents, tmp_path, watch, {})[PID].code == -9


def at(code, ms):
    return End(pid=0, code=code, at=GONE + ms * MS)


@pytest.mark.parametrize(
    ("ends", "stop_ms"),
    [
        ({}, None),
        ({1: at(1, 0)}, None),
        ({1: at(1, 0), 2: at(-15, 100)}, 100),
        ({1: at(-9, 0), 2: at(-15, 100), 3: at(-15, 105)}, 100),
        ({1: at(-15, 0), 2: at(-15, 200), 3: at(-15, 201)}, 200),
        ({1: at(-15, 0), 2: at(-15, 5)}, 0),
        ({1: at(-15, 0)}, None),
        ({1: at(0, 0), 2: at(-15, 100)}, None),
    ],
)
def test_ranks_asked_to_end_after_another_failed_were_stopped_by_the_launcher(ends, stop_ms):
    found = stop_of_others([source(pid) for pid in ends], ends, WatchedJob())
    assert found == (None if stop_ms is None else GONE + stop_ms * MS)


@pytest.mark.parametrize(("interrupted_ms", "stop_ms"), [(5, -20), (-300, -300), (60_000, 60_000)])
def test_a_signal_to_the_whole_group_stops_every_rank(interrupted_ms, stop_ms):
    ends = {1: at(-15, 0), 2: at(-15, 200), 3: at(1, -400)}
    watch = parse_watch(
        {"interrupted_ns": GONE + interrupted_ms * MS, "processes": {"1": {"ended_ns": GONE - 20 * MS}}}
    )
    assert interruption_ns([source(pid) for pid in ends], ends, watch) == GONE + stop_ms * MS


def test_nobody_interrupted_a_job_whose_rank_was_killed():
    assert interruption_ns([source(1)], {1: at(-15, 0)}, WatchedJob()) is None


@pytest.mark.parametrize(("line", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_the_kernel_says_how_a_process_ended_while_it_is_a_zombie(line, code):
    child = subprocess.Popen([sys.executable, "-S", "-c", f"input()\n{line}"], stdin=subprocess.PIPE)
    process = read_process(child.pid)
    assert process is not None
    assert read_exit_code(child.pid, process.start_ticks, None) is None
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_exit_code(child.pid, process.start_ticks, None) == code
    assert read_exit_code(child.pid, process.start_ticks + 1, None) is None
    child.wait()


def test_a_process_that_is_gone_says_nothing_without_a_pidfd():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    assert read_exit_code(child.pid, 1, None) is None


# Processes and kernel facts, on this machine and on trees of other machines.


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


def test_how_long_the_threads_of_a_process_waited_for_a_core(tmp_path: Path) -> None:
    for thread, text in ((7, "5 900 1\n"), (8, "5 0 7\n"), (9, "")):
        (tmp_path / "7" / "task" / str(thread)).mkdir(parents=True)
        (tmp_path / "7" / "task" / str(thread) / "schedstat").write_text(text)
    assert proc.read_run_delays(7, tmp_path) == {7: 900, 8: 0}
    assert proc.read_run_delays(1, tmp_path) == {}


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


# Processes that hang in the driver: two looks, and what tells a moment's sleep from a hang.


PLAN = ReadingPlan(sections=frozenset({"stuck_processes"}))


def no_wait(seconds):
    assert seconds == 1.0


def test_one_that_hangs_and_for_how_long(tmp_path):
    found = find_stuck(load_machine("nvlink8", tmp_path, "stuck"), no_wait)
    assert found == (StuckProcess(pid=777, name="nvidia-smi", wchan="os_acquire_mutex", seconds=245.0),)


def test_without_the_watchdog_only_the_two_looks_count(tmp_path):
    system = load_machine("nvlink8", tmp_path, "stuck")
    (tmp_path / "dev/kmsg").unlink()
    assert [one.seconds for one in find_stuck(system, no_wait)] == [1.0]


def test_nobody_means_one_look(tmp_path):
    def never(_seconds):
        raise AssertionError("nobody was there to look at again")

    assert find_stuck(load_machine("nvlink8", tmp_path), never) == ()


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("stat", ") D ", ") S "),
        ("stat", " 50 10 ", " 51 10 "),
        ("stat", " 9000 ", " 9001 "),
        ("status", "ctxt_switches:\t5", "ctxt_switches:\t6"),
    ],
    ids=["woke", "ran", "another-process", "switched"],
)
def test_one_that_moved_meanwhile_does_not_hang(tmp_path, file, before, after):
    system = load_machine("nvlink8", tmp_path, "stuck")
    path = tmp_path / "proc/777" / file

    def move(_seconds):
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))

    assert find_stuck(system, move) == ()


def test_a_name_that_is_hidden_does_not_hide_a_tool(tmp_path):
    """To other users the kernel gives 0 for the place where a process sleeps."""
    system = load_machine("nvlink8", tmp_path, "stuck")
    (tmp_path / "proc/777/wchan").write_text("0")
    assert [one.wchan for one in find_stuck(system, no_wait)] == [""]


def test_the_stack_shows_what_the_name_does_not(tmp_path):
    system = load_machine("nvlink8", tmp_path, "stuck")
    (tmp_path / "proc/778/stack").write_text("[<0>] rwsem_down_write_slowpath\n[<0>] uvm_ioctl+0x1/0x2 [nvidia_uvm]\n")
    assert [one.pid for one in find_stuck(system, no_wait)] == [777, 778]


def test_a_thread_of_the_kernel_may_sleep(tmp_path):
    system = load_machine("nvlink8", tmp_path, "stuck")
    path = tmp_path / "proc/777/stat"
    path.write_text(path.read_text().replace(") D 1 ", ") D 2 "))
    assert find_stuck(system, no_wait) == ()


def test_without_a_driver_there_is_nothing_to_hang_in(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_stuck(System(root=tmp_path), PLAN)
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


def test_a_fatal_dump() -> None:
    before, fatal = split_fatal("Thread 0x1 (most recent call first):\n" + FATAL)
    assert before == "Thread 0x1 (most recent call first):\n"
    other, main = parse_stacks(fatal, 0x7F22, ROOTS)
    assert (other.is_main, main.is_main) == (False, True)
    assert [(f.function, f.line, f.user) for f in main.frames] == [
        ("<module>", 0, True), ("load", 14, True), ("string_at", 519, False),
    ]  # fmt: skip
    assert not any(frame.user for frame in other.frames)


def test_the_thread_that_a_fatal_signal_hit() -> None:
    (struck,) = parse_stacks(struck_thread(FATAL), 0x7F11, ROOTS)
    assert (struck.is_main, struck.frames[1].line) == (False, 14)
    assert struck_thread(FATAL.replace("Current thread", "Thread")) == ""  # a thread of C++ alone


def test_without_a_fatal_error_there_is_none() -> None:
    assert split_fatal("nothing of note\n") == ("nothing of note\n", "")


def test_damaged_text_gives_no_stack() -> None:
    assert parse_stacks("\x00\x01 File nonsense\n  File broken line\n", 1, ROOTS) == ()


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
    fatal = split_fatal(done.stderr)[1]
    assert fatal
    assert bool(struck_thread(fatal)) is (who == "the main thread")


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
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def process_of(env, **known):
    return process_facts(System(env=env, calls=RecordedCalls(answers={"cpus": "0-2"})), **known)


@pytest.mark.parametrize(
    ("env", "rank", "local_rank"),
    [
        ({}, None, None),
        ({"RANK": "5", "LOCAL_RANK": "1"}, 5, 1),
        (STEP, 3, 1),
        ({**STEP, "RANK": "7", "LOCAL_RANK": "0"}, 7, 0),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}, None, None),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 2, 0),
        ({**STEP, "OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 6, 2),
        ({"PMI_RANK": "4"}, 4, None),
        ({"RANK": "two", "PMI_RANK": "4"}, 4, None),
    ],
)
def test_ranks(env, rank, local_rank):
    process = process_of(env)
    assert (process.rank, process.local_rank) == (rank, local_rank)


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


def test_processes_of_one_host_are_one_node():
    assert identity() == identity()


def test_a_container_with_a_network_of_its_own_is_another_node():
    require("unshare")
    assert identity("unshare", "--net")[1] != identity()[1]


def test_a_task_with_mounts_of_its_own_is_on_the_same_node():
    require("unshare")
    own, other = identity(), identity("unshare", "--mount")
    assert own[1] == other[1]
    assert own[2] != other[2]


def test_where_there_is_no_proc_the_name_has_to_do(tmp_path):
    mac = System(root=tmp_path, env={}, calls=RecordedCalls(answers={"hostname": "mac"}))
    assert read_identity(mac).machine == "mac//"
