"""What faulthandler writes is read back, on request and for a fatal signal."""

import faulthandler
import subprocess
import sys
import tempfile
import threading

import pytest

from ddpdoctor.collect.rank.answers import parse_stacks, split_fatal, struck_thread

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
