"""Tracebacks of Python in logs: whose they are, where the error began, and what it says about other ranks."""

from typing import Any

import pytest

from ddpdoctor.evidence.errors import classify
from ddpdoctor.evidence.tracebacks import TracebackReader
from ddpdoctor.model.evidence import ErrorLine, Exited, Failed, Nature, Waiting
from tests.unit.evidence.feeding import feed, only, told

PACKAGES = "/opt/venv/lib/python3.12/site-packages"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"


def failures(text: str) -> list[dict[str, Any]]:
    """Return the failures of a text as tables: rank, type, message, and frames as "file:line"."""
    found = []
    for failed in only(Failed, feed(TracebackReader(), text)):
        table = told(failed)
        table["frames"] = [f"{frame.file.rpartition('/')[2]}:{frame.line}" for frame in failed.frames]
        found.append({"rank": failed.who.rank, **table})
    return found


def test_a_traceback_with_ranks_before_its_lines() -> None:
    text = f"""
    [rank1]: Traceback (most recent call last):
    [rank1]:   File "/home/me/train.py", line 61, in <module>
    [rank1]:     main()
    [rank1]:     ~~~~^^
    [rank1]:   File "{PACKAGES}/torch/nn/modules/module.py", line 1751, in _call_impl
    [rank1]:     return forward_call(*args, **kwargs)
    [rank1]: ValueError: bad batch
    """
    (failed,) = failures(text)
    assert (failed["rank"], failed["type"], failed["message"]) == (1, "ValueError", "bad batch")
    assert failed["frames"] == ["train.py:61", "module.py:1751"]
    (fact,) = feed(TracebackReader(), text)
    assert [frame.user for frame in fact.frames] == [True, False]  # type: ignore[attr-defined]
    assert fact.said == "ValueError: bad batch"
    assert fact.spot.line == 7


def test_lines_of_two_ranks_that_alternate_are_told_apart() -> None:
    ranks = [
        [f"[rank{rank}]: {line}" for line in (
            "Traceback (most recent call last):", f'  File "/home/me/r{rank}.py", line {rank}, in main', "    x()",
            f"KeyError: {rank}",
        )]
        for rank in range(3)
    ]  # fmt: skip
    text = "\n".join(line for lines in zip(*ranks, strict=True) for line in lines)
    assert [(f["rank"], f["message"], f["frames"]) for f in failures(text)] == [
        (rank, str(rank), [f"r{rank}.py:{rank}"]) for rank in range(3)
    ]


def test_bare_tracebacks_of_two_processes_that_alternate() -> None:
    text = """
    Traceback (most recent call last):
    Traceback (most recent call last):
      File "/home/me/train.py", line 9, in <module>
      File "/home/me/train.py", line 9, in <module>
        main()
        main()
      File "/home/me/train.py", line 5, in main
      File "/home/me/train.py", line 5, in main
        raise ValueError("no GPU")
        raise ValueError("no GPU")
    ValueError: no GPU
    ValueError: no GPU
    """
    assert [(f["message"], f["frames"]) for f in failures(text)] == [("no GPU", ["train.py:9", "train.py:5"])] * 2


@pytest.mark.parametrize(
    "words",
    [
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    ],
)
def test_the_first_exception_of_a_chain_is_the_cause(words: str) -> None:
    text = f"""
    [rank0]: Traceback (most recent call last):
    [rank0]:   File "/home/me/data.py", line 20, in load
    [rank0]:     open(path)
    [rank0]: FileNotFoundError: [Errno 2] No such file or directory: 'shard-7'

    [rank0]: {words}

    [rank0]: Traceback (most recent call last):
    [rank0]:   File "/home/me/train.py", line 3, in <module>
    [rank0]:     load()
    [rank0]: RuntimeError: cannot load
    """
    (failed,) = failures(text)
    assert (failed["type"], failed["frames"]) == ("FileNotFoundError", ["data.py:20"])


def test_an_empty_queue_that_was_handled_is_not_the_cause() -> None:
    text = f"""
    Traceback (most recent call last):
      File "{PACKAGES}/torch/utils/data/dataloader.py", line 1243, in _try_get_data
        data = self._data_queue.get(timeout=timeout)
    _queue.Empty

    During handling of the above exception, another exception occurred:

    Traceback (most recent call last):
      File "/home/me/train.py", line 33, in main
        for batch in loader:
    RuntimeError: DataLoader worker (pid(s) 411) exited unexpectedly
    """
    (failed,) = failures(text)
    assert (failed["type"], failed["frames"], failed["in_worker"]) == ("RuntimeError", ["train.py:33"], True)


def test_a_cause_in_a_library_shows_the_way_to_it() -> None:
    text = f"""
    [rank0]: Traceback (most recent call last):
    [rank0]:   File "{PACKAGES}/yaml/scanner.py", line 20, in scan
    [rank0]: ScannerError: bad indentation

    [rank0]: The above exception was the direct cause of the following exception:

    [rank0]: Traceback (most recent call last):
    [rank0]:   File "/home/me/train.py", line 3, in <module>
    [rank0]: ConfigError: bad config
    """
    (failed,) = failures(text)
    assert (failed["type"], failed["frames"]) == ("ScannerError", ["train.py:3", "scanner.py:20"])


def test_the_error_of_a_loaders_worker_is_the_workers() -> None:
    text = f"""
    [rank3]: Traceback (most recent call last):
    [rank3]:   File "/home/me/train.py", line 33, in main
    [rank3]:     for batch in loader:
    [rank3]:   File "{PACKAGES}/torch/_utils.py", line 769, in reraise
    [rank3]:     raise exception
    [rank3]: ValueError: Caught ValueError in DataLoader worker process 2.
    [rank3]: Original Traceback (most recent call last):
    [rank3]:   File "{PACKAGES}/torch/utils/data/_utils/worker.py", line 351, in _worker_loop
    [rank3]:     data = fetcher.fetch(index)
    [rank3]:   File "/home/me/data.py", line 20, in __getitem__
    [rank3]:     raise ValueError("sample 7 is broken")
    [rank3]: ValueError: sample 7 is broken
    """
    (failed,) = failures(text)
    assert (failed["rank"], failed["message"], failed["in_worker"]) == (3, "sample 7 is broken", True)
    assert failed["frames"] == ["train.py:33", "_utils.py:769", "worker.py:351", "data.py:20"]


def test_a_group_of_exceptions_names_the_first() -> None:
    text = """
      + Exception Group Traceback (most recent call last):
      |   File "/home/me/train.py", line 5, in <module>
      |     asyncio.run(main())
      | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
      +-+---------------- 1 ----------------
        | Traceback (most recent call last):
        |   File "/home/me/fetch.py", line 8, in fetch
        |     raise ValueError("first")
        | ValueError: first
        +---------------- 2 ----------------
        | Traceback (most recent call last):
        |   File "/home/me/fetch.py", line 8, in fetch
        |     raise ValueError("second")
        | ValueError: second
        +------------------------------------
    """
    (failed,) = failures(text)
    assert (failed["type"], failed["message"]) == ("ValueError", "first")
    assert failed["frames"] == ["train.py:5", "fetch.py:8"]


@pytest.mark.parametrize(
    "header",
    ['Traceback (most recent call last):\n  File "/home/me/train.py", line 1, in <module>\n    import model\n', ""],
)
def test_a_mistake_in_the_syntax_has_no_function(header: str) -> None:
    text = f'{header}  File "/home/me/model.py", line 10\n    def f(:\n          ^\nSyntaxError: invalid syntax'
    (failed,) = failures("x\n" + text)
    assert failed["type"] == "SyntaxError"
    assert failed["frames"][-1] == "model.py:10"


def test_a_spawned_process_is_a_local_rank() -> None:
    text = f"""
    Traceback (most recent call last):
      File "/home/me/train.py", line 30, in <module>
        mp.spawn(main, nprocs=2)
      File "{PACKAGES}/torch/multiprocessing/spawn.py", line 215, in join
        raise ProcessRaisedException(msg, error_index, failed_process.pid)
    torch.multiprocessing.spawn.ProcessRaisedException:

    -- Process 1 terminated with the following error:
    Traceback (most recent call last):
      File "{PACKAGES}/torch/multiprocessing/spawn.py", line 90, in _wrap
        fn(i, *args)
      File "/home/me/train.py", line 12, in main
        raise ValueError("no")
    ValueError: no
    """
    (failed,) = only(Failed, feed(TracebackReader(), text))
    assert (failed.type, failed.nature, failed.who.local_rank) == ("ValueError", Nature.OWN, 1)
    exited = text.split("torch.multiprocessing", maxsplit=1)[0] + (
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL"
    )
    (fact,) = only(Exited, feed(TracebackReader(), exited))
    assert (fact.signal, fact.who.local_rank) == ("SIGKILL", 1)


def test_a_message_of_several_lines_is_read_to_its_end() -> None:
    text = f"""
    [rank0]: Traceback (most recent call last):
    [rank0]:   File "{PACKAGES}/torch/distributed/distributed_c10d.py", line 2806, in all_reduce
    [rank0]:     work = group.allreduce([tensor], opts)
    [rank0]: torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, unhandled system error \
(run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5
    [rank0]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
    [rank0]: Last error:
    [rank0]: socketStartConnect: Connect to 10.0.0.2<41001> failed : Software caused connection abort
    [rank0]:[W309 14:02:51.000000257 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called
    """
    (failed,) = failures(text)
    assert failed["nature"] is Nature.FOLLOWS, "what NCCL says at its end is the cause"
    assert told(failed["operation"]) == {"op": "all_reduce"}


def test_a_wait_of_gloo_that_ran_out_is_a_wait_in_its_collective() -> None:
    text = f"""
    [rank2]: Traceback (most recent call last):
    [rank2]:   File "/home/me/train.py", line 40, in main
    [rank2]:     dist.broadcast(x, 0)
    [rank2]:   File "{PACKAGES}/torch/distributed/distributed_c10d.py", line 2900, in broadcast
    [rank2]:     work.wait()
    [rank2]: RuntimeError: [/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete
    """
    facts = feed(TracebackReader(), text)
    (waiting,) = only(Waiting, facts)
    assert (waiting.timed_out, waiting.limit_s, waiting.operation.op) == (True, 8.0, "broadcast")
    assert [frame.line for frame in waiting.frames] == [40, 2900]
    assert only(Failed, facts)[0].nature is Nature.TIMED_OUT


def test_the_launchers_own_error_follows_from_others() -> None:
    text = f"""
    Traceback (most recent call last):
      File "/opt/venv/bin/torchrun", line 8, in <module>
        sys.exit(main())
      File "{PACKAGES}/torch/distributed/run.py", line 1019, in run
        elastic_launch(
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
    ============================================================
    """
    (failed,) = failures(text)
    assert failed["nature"] is Nature.FOLLOWS
    text = text.replace(
        "multiprocessing.errors.ChildFailedError:", "multiprocessing.api.SignalException: Process 310 got signal: 15"
    )
    assert failures(text)[0]["nature"] is Nature.STOPPED


@pytest.mark.parametrize(
    "text",
    [
        """
        Exception ignored in: <function Pool.__del__ at 0x7f>
        Traceback (most recent call last):
          File "/home/me/train.py", line 3, in __del__
            self.close()
        AttributeError: 'NoneType' object has no attribute 'close'
        """,
        """
        --- Logging error ---
        Traceback (most recent call last):
          File "/home/me/train.py", line 3, in emit
        ValueError: I/O operation on closed file
        """,
        'E0309 14:02:19 4011 error_handler.py] {"message": {"extraInfo": {"py_callstack": "Traceback (most recent call last):\\n"}}}',
        "Retrying after requests.exceptions.ConnectionError: Connection reset by peer",
        '  File "/home/me/train.py", line 3, in main',
        "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB: trying a smaller batch",
        """
          traceback : Traceback (most recent call last):
            File "/home/me/train.py", line 3, in main
          ValueError: said by the table
        """,
    ],
)  # fmt: skip
def test_what_ended_nothing_is_no_failure(text: str) -> None:
    assert not [fact for fact in feed(TracebackReader(), text) if not isinstance(fact, ErrorLine)]


def test_an_exception_whose_traceback_is_lacking_counts_if_torch_wrote_it() -> None:
    (failed,) = failures("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert (failed["rank"], failed["type"], failed["memory"]) == (3, "OutOfMemoryError", True)
    (failed,) = failures(f"RuntimeError: {GLOO} Connection closed by peer [10.0.0.3]:4242")
    assert (failed["nature"], failed["peer_hosts"]) == (Nature.PEER_LOST, ("10.0.0.3",))


def test_lines_of_others_in_a_bare_traceback_are_left_out() -> None:
    text = """
    Traceback (most recent call last):
      File "/home/me/train.py", line 9, in <module>
    step 12 loss 3.1
    Epoch: 3
        main()
    2026-03-09 14:02:11 INFO saved
    ValueError: no GPU
    step 13 loss 3.1
    """
    (failed,) = failures(text)
    assert (failed["type"], failed["message"], failed["frames"]) == ("ValueError", "no GPU", ["train.py:9"])


def test_what_was_held_back_comes_before_the_next_launch() -> None:
    from ddpdoctor.evidence.lines import split_line

    reader = TracebackReader()
    lines = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/home/me/t.py", line 9, in f',
        "[rank0]: KeyError: 1",
    ]
    for number, line in enumerate(lines, 1):
        assert not reader.read(split_line(line, number, "f"))
    start = "Setting OMP_NUM_THREADS environment variable for each process to be 1"
    assert [type(fact) for fact in reader.read(split_line(start, 4, "f"))] == [Failed]
    assert reader.end() == []


def test_a_cut_traceback_is_given_up() -> None:
    text = """
    [rank0]: Traceback (most recent call last):
    [rank0]:   File "/home/me/a.py", line 9, in f
    [rank0]: Traceback (most recent call last):
    [rank0]:   File "/home/me/b.py", line 1, in g
    [rank0]: KeyError: 1
    """
    assert [failed["frames"] for failed in failures(text)] == [["b.py:1"]]


NATURES = [
    ("RuntimeError", f"{GLOO} Connection closed by peer [127.0.0.1]:61594.", Nature.PEER_LOST),
    ("RuntimeError", "[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.4]:51: Connection reset by peer", Nature.PEER_LOST),
    ("RuntimeError", "Application timeout caused pair closure, gloo", Nature.PEER_LOST),
    ("DistNetworkError", "failed to recv, got 0 bytes", Nature.PEER_LOST),
    ("RuntimeError", "NCCL communicator was aborted on rank 7.  Original reason for failure was: x", Nature.PEER_LOST),
    ("DistStoreError", "wait timeout after 8000ms, keys: /default_pg/0//cpu//0/1", Nature.TIMED_OUT),
    ("DistNetworkError", "The client socket has timed out after 60000ms while trying to connect to (h1, 29500).", Nature.TIMED_OUT),
    ("RuntimeError", "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 6000 ms", Nature.TIMED_OUT),
    ("RuntimeError", "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.", Nature.TIMED_OUT),
    ("RuntimeError", "Detected mismatch between collectives on ranks. Rank 0 is running", Nature.FOLLOWS),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", Nature.OWN),
    ("RuntimeError", "CUDA out of memory. Tried to allocate more than 1EB memory.", Nature.FOLLOWS),
    ("KeyboardInterrupt", "", Nature.STOPPED),
    ("CalledProcessError", "Command '['torchrun', 'x.py']' returned non-zero exit status 1.", Nature.FOLLOWS),
    ("CalledProcessError", "Command '['ffmpeg']' returned non-zero exit status 1.", Nature.OWN),
    ("ConnectionError", "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))", Nature.OWN),
    ("ValueError", "Broken pipeline", Nature.OWN),
    ("ReadTimeout", "HTTPSConnectionPool: Read timed out.", Nature.OWN),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "nature"), NATURES)
def test_what_an_error_says_about_who_caused_it(kind: str, message: str, nature: Nature) -> None:
    assert classify(kind, message).nature is nature


def test_the_ranks_and_hosts_that_an_error_names() -> None:
    assert classify("RuntimeError", "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 6000 ms").peers == (1, 2)
    assert classify("RuntimeError", f"{GLOO} Connection closed by peer [127.0.0.1]:61594.").peer_hosts == ()
    innocent = (
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
    )
    assert classify("RuntimeError", innocent).peers == (0,)
