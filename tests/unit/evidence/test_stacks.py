"""Stacks in every format: whose they are, which thread counts, and what it does."""

import json

import pytest

from ddpdoctor.evidence.reader import Document
from ddpdoctor.evidence.stacks import JsonStackReader, StackReader
from ddpdoctor.model.evidence import Doing, Hint, Stacked, Who

PY_SPY = """Process {pid}: /usr/bin/python -u train.py --cfg base.yaml
Python v3.11.7 (/usr/local/bin/python3.11)

Thread {pid} ({state}): "MainThread"
{frames}
Thread {other} (idle): "Thread-1 (_pin_memory_loop)"
    wait (threading.py:331)
    _pin_memory_loop (torch/utils/data/_utils/pin_memory.py:54)
"""
BACKWARD = """    _engine_run_backward (torch/autograd/graph.py:829)
    backward (torch/autograd/__init__.py:353)
    backward (torch/_tensor.py:626)
    train_step (train.py:77)
    main (train.py:99)
"""
ALL_REDUCE = """    all_reduce (torch/distributed/distributed_c10d.py:2501)
    wrapper (torch/distributed/c10d_logger.py:81)
    main (train.py:50)
"""
NATIVE = (
    """    __futex_wait (libc.so.6)
    c10d::Work::wait (libtorch_cpu.so)
"""
    + ALL_REDUCE
)

LOADER = """    wait (threading.py:331)
    get (queue.py:180)
    _try_get_data (torch/utils/data/dataloader.py:1251)
    _next_data (torch/utils/data/dataloader.py:1402)
    main (train.py:60)
"""
INIT = """    _create_c10d_store (torch/distributed/rendezvous.py:189)
    init_process_group (torch/distributed/distributed_c10d.py:1710)
    main (train.py:12)
"""


def py_spy(frames: str, pid: int = 520, state: str = "idle") -> str:
    return PY_SPY.format(pid=pid, other=pid + 9, state=state, frames=frames)


def read(text: str, who: Who | None = None) -> list[Stacked]:
    reader = StackReader()
    assert reader.recognizes(text.encode())
    found = reader.read(Document(source="s", path=None, body=text.encode(), who=who or Who()))
    return [fact for fact in found.facts if isinstance(fact, Stacked)]


@pytest.mark.parametrize(
    ("frames", "doing", "op"),
    [
        (BACKWARD, Doing.COLLECTIVE, "backward"),
        (ALL_REDUCE, Doing.COLLECTIVE, "all_reduce"),
        (NATIVE, Doing.COLLECTIVE, "all_reduce"),
        ("    lookup (cache.py:31)\n    main (train.py:99)\n", Doing.OWN, None),
        ("    recv (socket.py:5)\n    fetch (requests/sessions.py:9)\n    main (train.py:99)\n", Doing.OWN, None),
        ("    synchronize (torch/cuda/__init__.py:985)\n    main (train.py:99)\n", Doing.DEVICE, None),
        ("    at::native::_local_scalar_dense_cuda (libtorch_cuda.so)\n    main (train.py:9)\n", Doing.DEVICE, None),
        (
            LOADER,
            Doing.DATA,
            None,
        ),
        (
            INIT,
            Doing.INIT,
            "init_process_group",
        ),
        ("    _shutdown (threading.py:1622)\n", Doing.EXIT, None),
        ("    destroy_process_group (torch/distributed/distributed_c10d.py:2176)\n    main (t.py:9)\n", Doing.EXIT,
         "destroy_process_group"),
    ],
)  # fmt: skip
def test_what_the_main_thread_does(frames: str, doing: Doing, op: str | None) -> None:
    (stack,) = read(py_spy(frames), Who(rank=3))
    assert (stack.doing, stack.operation and stack.operation.op) == (doing, op)
    assert (stack.who, stack.worker) == (Who(rank=3, pid=520), False)


def test_frames_are_outermost_first_and_the_users_own_are_marked() -> None:
    (stack,) = read(py_spy(BACKWARD))
    assert [(frame.function, frame.line, frame.user) for frame in stack.frames] == [
        ("main", 99, True), ("train_step", 77, True), ("backward", 626, False), ("backward", 353, False),
        ("_engine_run_backward", 829, False),
    ]  # fmt: skip


def test_several_processes_in_one_file_are_numbered_by_pid_if_nothing_names_them() -> None:
    text = py_spy(BACKWARD, 523) + "\n" + py_spy(ALL_REDUCE, 521) + "\n" + py_spy(ALL_REDUCE, 522)
    assert [(stack.who.pid, stack.who.rank) for stack in read(text)] == [(523, 2), (521, 0), (522, 1)]


@pytest.mark.parametrize("label", ["=== rank 3 ===", "==> rank_3.txt <==", "# rank 3", "--- rank=3 ---"])
def test_labels_between_the_stacks_name_ranks(label: str) -> None:
    text = f"=== rank 7 ===\n{py_spy(BACKWARD, 700)}\n{label}\n{py_spy(ALL_REDUCE, 300)}"
    assert [(stack.who.pid, stack.who.rank) for stack in read(text)] == [(700, 7), (300, 3)]


def test_local_ranks_come_from_the_command_line() -> None:
    text = py_spy(BACKWARD).replace("train.py --cfg", "train.py --local_rank=5 --cfg")
    assert [stack.who.local_rank for stack in read(text)] == [5]


def test_loader_workers_are_told_from_ranks() -> None:
    """A forked worker has the frames of its rank below its own."""
    worker = (
        "    __getitem__ (data.py:15)\n    fetch (torch/utils/data/_utils/fetch.py:54)\n"
        "    _worker_loop (torch/utils/data/_utils/worker.py:350)\n    run (multiprocessing/process.py:108)\n"
        "    main (train.py:120)\n"
    )
    text = py_spy(BACKWARD, 520) + "-" * 40 + "\n" + py_spy(worker, 611)
    text = text.replace("Process 611:", "Process 611:").replace("Python v3.11.7", "Python v3.11.7", 1)
    assert [(stack.who.pid, stack.worker) for stack in read(text)] == [(520, False), (611, True)]


def test_the_agent_of_torchrun_is_no_rank() -> None:
    agent = (
        "    sleep (time.py:1)\n    _invoke_run (torch/distributed/elastic/agent/server/api.py:900)\n"
        "    run (torch/distributed/run.py:936)\n    main (torch/distributed/run.py:945)\n"
    )
    assert [stack.who.pid for stack in read(py_spy(agent, 100) + py_spy(BACKWARD, 101))] == [101]


def test_faulthandler_lists_the_innermost_frame_first() -> None:
    text = """Timeout (0:00:30)!
Thread 0x00007f2a11ffb700 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f2a22ffc740 (most recent call first):
  File "/home/u/cache.py", line 31 in lookup
  File "/home/u/train.py", line 99 in main
  File "/home/u/train.py", line 120 in <module>
"""
    (stack,) = read(text, Who(rank=2))
    assert [frame.function for frame in stack.frames] == ["<module>", "main", "lookup"]
    assert stack.doing is Doing.OWN


def test_pystack_lists_the_outermost_frame_first() -> None:
    text = """Traceback for thread 790 (python) [] (most recent call last):
    (Python) File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap

Traceback for thread 789 (python) [Has the GIL] (most recent call last):
    (Python) File "/home/u/train.py", line 120, in <module>
        main()
    (Python) File "/home/u/cache.py", line 31, in lookup
        spin()
"""
    (stack,) = read(text)
    assert [frame.function for frame in stack.frames] == ["<module>", "lookup"]


def test_dumps_of_the_debug_server_name_ranks_hosts_and_who_did_not_answer() -> None:
    text = """PARTIAL DATA: 2/3 workers responded
  Rank 2: Timeout: timed out
=== Rank 0: http://n1:42101/handler/dump_traceback? ===
Thread 0x00007f2a22ffc740 (most recent call first):
  File "/opt/torch/distributed/distributed_c10d.py", line 2501 in all_reduce
  File "/home/u/train.py", line 50 in <module>
=== Rank 1: http://n2:42102/handler/dump_traceback? ===
Thread 0x00007f2a22ffc740 (most recent call first):
  File "/home/u/train.py", line 31 in <module>
"""
    reader = StackReader()
    found = reader.read(Document(source="s", path=None, body=text.encode()))
    stacks = [fact for fact in found.facts if isinstance(fact, Stacked)]
    assert [(one.who.rank, one.who.host, one.doing) for one in stacks] == [
        (0, "n1", Doing.COLLECTIVE), (1, "n2", Doing.OWN)
    ]  # fmt: skip
    (hint,) = [fact for fact in found.facts if isinstance(fact, Hint)]
    assert (hint.who.rank, "GIL" in hint.words) == (2, True)


def test_json_of_py_spy() -> None:
    frame = {"name": "lookup", "filename": "/home/u/cache.py", "module": None, "short_filename": "cache.py", "line": 31}
    thread = {"pid": 9, "thread_id": 1, "os_thread_id": 9, "active": True, "owns_gil": True, "frames": [frame]}
    body = json.dumps([{**thread, "thread_name": "MainThread"}]).encode()
    reader = JsonStackReader()
    assert reader.recognizes(body)
    (stack,) = reader.read(Document(source="s", path=None, body=body, who=Who(rank=1))).facts
    assert isinstance(stack, Stacked)
    assert (stack.who, stack.state, stack.frames[0].file) == (Who(rank=1, pid=9), "active+gil", "/home/u/cache.py")
    assert reader.read(Document(source="s", path=None, body=body[:-9])).problem.startswith("damaged")


@pytest.mark.parametrize(
    "text",
    [
        "2026-03-09 14:02:11 INFO train: step 1 loss 4.1538\n" * 30,
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    x()\nValueError: no\n',
        '[{"loss": 3}]',
        "",
    ],
)  # fmt: skip
def test_logs_are_no_stacks(text: str) -> None:
    assert not StackReader().recognizes(text.encode())
    assert not JsonStackReader().recognizes(text.encode())
