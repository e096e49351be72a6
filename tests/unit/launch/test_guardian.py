"""A watcher that is killed leaves nobody of its job behind, at whatever moment of the start that happens.

The processes that die or are left hold a pipe open: its end says that all of them have gone, the guardian too.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.launch.processes.guardian import Guardian
from tests.scenarios.running import wait_for

SLEEPS = "import os, time; os.write({fd}, b'here '); time.sleep(600)"
LEAVES_A_CHILD = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeps!r}], start_new_session=True, "
    "close_fds=False)"
)
KEEPS_STARTING = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "while True: subprocess.Popen([sys.executable, '-c', {sleeps!r}], start_new_session=True, close_fds=False); "
    "time.sleep(0.1)"
)
FORGETS = "import os, sys; os.execve(sys.executable, [sys.executable, '-c', {sleeps!r}], {{}})"


def kill_watcher() -> None:
    """Kill the parent, and return once it is gone."""
    watcher = os.getppid()
    os.kill(watcher, signal.SIGKILL)
    assert wait_for(lambda: os.getppid() != watcher)


def before_it_is_named(guardian: Guardian) -> None:
    kill_watcher()
    guardian.protect_self()


def before_it_is_the_launcher(guardian: Guardian) -> None:
    guardian.protect_self()
    kill_watcher()


def once_the_launcher_runs(guardian: Guardian) -> None:
    guardian.protect_self()


def once_the_launcher_has_ended(guardian: Guardian) -> None:
    guardian.protect_self()


def watch(folder: Path, fd: int, code: str, in_child: Callable[[Guardian], None]) -> None:
    """Be a watcher: start a guardian and a launcher, and be killed."""
    mark = {"DDPDOCTOR_RUN": str(folder), "DDPDOCTOR_WATCHER": str(os.getpid())}
    guardian = Guardian(folder, mark, lambda: os.write(fd, b"orphaned "))
    launcher = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env={**os.environ, **mark}, pass_fds=(fd,),
        preexec_fn=lambda: in_child(guardian),  # noqa: PLW1509 - no threads here
    )  # fmt: skip
    if in_child is once_the_launcher_has_ended:
        launcher.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def all_that_is_said(folder: Path, code: str, in_child: Callable[[Guardian], None]) -> bytes:
    """Return what the job wrote until its last process had ended."""
    reader, writer = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(reader)
        os.set_inheritable(writer, True)  # noqa: FBT003 - positional only
        try:
            watch(folder, writer, code.format(fd=writer, sleeps=SLEEPS.format(fd=writer)), in_child)
        finally:
            os._exit(1)
    os.close(writer)
    said = b""
    with os.fdopen(reader, "rb") as file:
        while chunk := file.read():
            said += chunk
    assert os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1]) == -signal.SIGKILL
    return said


@pytest.mark.parametrize("in_child", [before_it_is_named, before_it_is_the_launcher, once_the_launcher_runs])
@pytest.mark.parametrize("code", [SLEEPS, LEAVES_A_CHILD, KEEPS_STARTING, FORGETS])
def test_a_killed_watcher_leaves_nobody(code: str, in_child: Callable[[Guardian], None], tmp_path: Path) -> None:
    assert all_that_is_said(tmp_path, code, in_child).endswith(b"orphaned ")


def test_a_process_that_the_launcher_has_left_behind_is_found(tmp_path: Path) -> None:
    assert all_that_is_said(tmp_path, LEAVES_A_CHILD, once_the_launcher_has_ended).endswith(b"orphaned ")


def test_a_watcher_killed_before_it_starts_anything(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        Guardian(tmp_path, {"DDPDOCTOR_RUN": str(tmp_path)}, lambda: os.write(writer, b"orphaned"))
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == b""
    os.waitpid(watcher, 0)


def test_a_guardian_that_is_dismissed_stops_nobody(tmp_path: Path) -> None:
    guardian = Guardian(tmp_path, {"DDPDOCTOR_RUN": str(tmp_path)}, lambda: None)
    with subprocess.Popen(["sleep", "600"], preexec_fn=guardian.protect_self) as launcher:  # noqa: PLW1509
        guardian.dismiss()
        assert launcher.poll() is None
        launcher.kill()
