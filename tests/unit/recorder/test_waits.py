"""What the stack of a waiting rank names: the lock file that it polls for, and the line that moved the job's store."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from torch.utils.file_baton import FileBaton

from ddpdoctor.recorder import frames
from ddpdoctor.recorder.stacks import waits
from ddpdoctor.recorder.state import MASTER_VARIABLE, here


def poll(path: Path, done: threading.Event) -> None:
    while os.path.exists(path) and not done.is_set():  # noqa: PTH110 - as scripts do
        time.sleep(0.01)


def wait_for_other_file(path: Path, done: threading.Event) -> None:
    while path.exists() and not done.is_set():
        time.sleep(0.01)


def sleep_only(path: Path, done: threading.Event) -> None:
    while path is not None and not done.is_set():
        time.sleep(0.01)


def baton(path: Path, done: threading.Event) -> None:  # noqa: ARG001 - ends when its file is gone
    FileBaton(str(path), wait_seconds=0.01).wait()


def ask_kernel(path: Path, done: threading.Event) -> None:
    while not done.is_set():
        try:
            FileLock(path).acquire(timeout=0.2, poll_interval=0.01)
        except Timeout:
            continue


@contextmanager
def waiting(
    run: Callable[[Path, threading.Event], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Have another thread stand for the main one, and wait until it polls."""
    done = threading.Event()
    thread = threading.Thread(target=run, args=(path, done))
    thread.start()
    monkeypatch.setattr(here, "main_thread", thread.ident)
    try:
        yield
    finally:
        done.set()
        path.unlink(missing_ok=True)
        thread.join()


def seen() -> dict[str, str] | None:
    """Return the lock that is found within a while: a look may fall between two turns of the loop."""
    limit = time.monotonic() + 5
    while time.monotonic() < limit:
        found = waits.lock()
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(("run", "kind"), [(poll, "own-loop"), (baton, "marker"), (ask_kernel, "kernel")])
def test_the_lock_file_of_a_loop_is_named(
    run: Callable[[Path, threading.Event], None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "build.lock"
    path.touch()
    with FileLock(path) if kind == "kernel" else tmp_path.joinpath("other").open("w"):  # noqa: SIM117 - held meanwhile
        with waiting(run, path, monkeypatch):
            assert seen() == {"path": str(path), "kind": kind}


@pytest.mark.parametrize(("run", "name"), [(wait_for_other_file, "block.bin"), (sleep_only, "build.lock")])
def test_what_is_no_lock_or_is_not_looked_for_is_not_named(
    run: Callable[[Path, threading.Event], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.touch()
    with waiting(run, path, monkeypatch):
        assert [waits.lock() for _ in range(50)] == [None] * 50


SETS = """
import os
def read():
    return os.environ["MASTER_PORT"]
def main():
    read()
    {line}
    return 1
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("os.environ['MASTER_PORT'] = '29999'", 7),
        ("os.environ.update(MASTER_PORT='29999', X='1')", 7),
        ("os.environ.update({'MASTER_PORT': '29999'})", 7),
        ("os.environ['MASTER_ADDR'] = 'node0'", None),
        ("print(os.environ['MASTER_PORT'])", None),
    ],
)
def test_the_line_that_sets_another_port_is_found(
    line: str, found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MASTER_VARIABLE, "node0:29500")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29999")
    code = compile(SETS.format(line=line), str(tmp_path / "train.py"), "exec")
    assert frames.is_user_file(code.co_filename)
    place = waits._setting_line([code])
    assert (place["l"] if place is not None else None) == found


def test_nothing_is_searched_where_the_launchers_address_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASTER_VARIABLE, "node0:29500")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert waits._replaced() == []
    assert waits.store() is None
