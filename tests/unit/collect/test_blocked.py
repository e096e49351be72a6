"""What the main thread of a process sleeps in, by files of /proc that were recorded, and of real processes."""

import fcntl
import os
import socket
import subprocess
import sys
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
from ddpdoctor.collect.connections import parse_end, read_connections, read_rows
from ddpdoctor.model.causes import Blocked, LostChild
from tests.scenarios.running import wait_for

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
