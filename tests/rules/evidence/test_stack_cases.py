"""Jobs of which stacks tell: who is elsewhere than the others, and what a stack does not tell."""

import json

import pytest

from tests.evidence_texts import (
    ALL_REDUCE,
    BACKWARD,
    IN_ALL_REDUCE,
    IN_BACKWARD,
    MAIN,
    WRAPPER,
    closed_by,
    interleaved,
    pyspy,
    raised,
    steps,
    text,
    traceback,
)
from tests.rules.evidence.truths import ABSENT, Truth, hold

LOCK = ("lookup (cache.py:31)", "train_step (train.py:70)", "main (train.py:99)")
LOADER = (
    "wait (threading.py:359)",
    "get (queue.py:180)",
    "_try_get_data (torch/utils/data/dataloader.py:1251)",
    "_get_data (torch/utils/data/dataloader.py:1415)",
    "_next_data (torch/utils/data/dataloader.py:1448)",
    "__next__ (torch/utils/data/dataloader.py:701)",
    "main (train.py:93)",
)
INIT = (
    "_store_based_barrier (torch/distributed/distributed_c10d.py:870)",
    "init_process_group (torch/distributed/distributed_c10d.py:1710)",
    "wrapper (torch/distributed/c10d_logger.py:97)",
    "main (train.py:12)",
)
AT_EXIT = ("_shutdown (threading.py:1594)",)
DEVICE = (
    "_local_scalar_dense (torch/_ops.py:1)",
    "item (torch/_tensor.py:1)",
    "log (train.py:85)",
    "main (train.py:99)",
)
NUMA = 'Thread 900 (idle): "pt_autograd_0"\n    _run (threading.py:1)\n'


def files(*stacks: tuple[str, ...], name: str = "rank{}.txt") -> dict[str, str]:
    return {name.format(rank): pyspy(520 + rank, *stack) for rank, stack in enumerate(stacks)}


def test_one_waits_for_its_loader(tmp_path):
    hold(tmp_path, files(IN_BACKWARD, LOADER, IN_BACKWARD), Truth(kinds=("stuck",), ranks=(1,), where="train.py:93"))


def test_one_is_at_its_end(tmp_path):
    hold(tmp_path, files(IN_BACKWARD, IN_BACKWARD, AT_EXIT), Truth(kinds=("early-exit", "stuck"), ranks=(2,)))


def test_one_has_not_come_to_init(tmp_path):
    hold(tmp_path, files(INIT, LOCK, INIT), Truth(kinds=("stuck", "missing"), ranks=(1,), where="cache.py:31"))


def test_one_waits_for_its_device_and_the_others_in_backward(tmp_path):
    """.item() may wait for others as well: its own kernel may be that of a collective."""
    truth = Truth(
        kinds=("transport", "mismatch", "stuck", "deadlock"), or_cannot_tell=True, confidence=("low", "medium")
    )
    hold(tmp_path, files(IN_BACKWARD, DEVICE, IN_BACKWARD), truth)


def test_all_alike_in_a_collective(tmp_path):
    hold(tmp_path, files(*[IN_ALL_REDUCE] * 4), Truth(kinds=("transport",), ranks=(), or_cannot_tell=True))


def test_all_alike_in_their_own_code(tmp_path):
    """marin 7344: a jitted step tells nothing."""
    hold(tmp_path, files(*[("train_step (train.py:70)", "main (train.py:99)")] * 4), Truth(collect=("attach|py-spy",)))


def test_two_places_where_all_wait(tmp_path):
    """sglang 33289: one rank is in another collective than the others."""
    hold(
        tmp_path,
        files(IN_BACKWARD, IN_ALL_REDUCE, IN_BACKWARD, IN_BACKWARD),
        Truth(kinds=("mismatch",), ranks=(1,), confidence=("low",)),
    )


def test_one_file_with_all_processes_and_workers(tmp_path):
    """--subprocesses: blocks parted by a line; a forked worker has its rank's frames below its own."""
    rule = "-" * 31 + "\n"
    worker = (
        "fetch (torch/utils/data/_utils/fetch.py:52)",
        "_worker_loop (torch/utils/data/_utils/worker.py:349)",
        "main (train.py:93)",
    )
    blocks = [pyspy(520, *IN_BACKWARD), pyspy(521, *LOCK), pyspy(522, *IN_BACKWARD)]
    child = pyspy(530, *worker).replace("Python v", "Parent Process 520: /opt/venv/bin/python -u train.py\nPython v")
    hold(tmp_path, {"dump.txt": rule.join([*blocks, child])}, Truth(kinds=("stuck",), ranks=(1,), where="cache.py:31"))


def test_a_worker_that_is_stuck_is_its_ranks(tmp_path):
    worker = (
        "read (shards.py:9)",
        "fetch (torch/utils/data/_utils/fetch.py:52)",
        "_worker_loop (torch/utils/data/_utils/worker.py:349)",
        "main (train.py:93)",
    )
    given = files(IN_BACKWARD, LOADER, IN_BACKWARD)
    given["rank1.txt"] += pyspy(600, *worker).replace("Python v", "Parent Process 521: python train.py\nPython v")
    hold(tmp_path, given, Truth(kinds=("stuck",), ranks=(1,), where="shards.py:9"))


def test_all_wait_for_their_workers(tmp_path):
    """ray 52641: the stacks of the workers are needed."""
    hold(tmp_path, files(LOADER, LOADER), Truth(collect=("subprocesses",)))


def as_json(pid: int, stack: tuple[str, ...]) -> str:
    frames = []
    for frame in stack:
        name, _, place = frame.rstrip(")").partition(" (")
        file, _, line = place.rpartition(":")
        frames.append(
            {
                "name": name,
                "filename": f"/opt/venv/lib/python3.12/site-packages/{file}"
                if "torch" in file
                else f"/workspace/run/{file}",
                "module": None,
                "short_filename": file,
                "line": int(line),
                "locals": None,
                "is_entry": False,
                "is_shim_entry": False,
            }
        )
    thread = {
        "pid": pid,
        "thread_id": 140,
        "thread_name": "MainThread",
        "os_thread_id": pid,
        "active": False,
        "owns_gil": False,
        "frames": frames,
        "process_info": None,
    }
    return json.dumps([thread])


def test_json_of_pyspy(tmp_path):
    stacks = (IN_BACKWARD, IN_BACKWARD, LOCK)
    hold(
        tmp_path,
        {f"rank_{rank}.json": as_json(520 + rank, stack) for rank, stack in enumerate(stacks)},
        Truth(kinds=("stuck",), ranks=(2,), where="cache.py:31"),
    )


def test_faulthandler(tmp_path):
    def dump(*frames: tuple[str, int, str]) -> str:
        lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
        return text(
            [
                "Thread 0x00007f11aa7fe700 (most recent call first):",
                '  File "/usr/lib/python3.12/threading.py", line 359 in wait',
                "",
                "Current thread 0x00007f11c2a1b740 (most recent call first):",
                *lines,
            ]
        )

    waits = [
        ("/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 2806, "all_reduce"),
        ("/opt/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper"),
        ("/workspace/run/train.py", 80, "sync"),
        ("/workspace/run/train.py", 99, "<module>"),
    ]
    own = [("/workspace/run/cache.py", 31, "lookup"), ("/workspace/run/train.py", 99, "<module>")]
    hold(
        tmp_path,
        {f"rank{rank}.log": dump(*(own if rank == 2 else waits)) for rank in range(3)},
        Truth(kinds=("stuck",), ranks=(2,), where="cache.py:31"),
    )


def test_pystack(tmp_path):
    def dump(pid: int, *frames: tuple[str, int, str]) -> str:
        lines = [
            line
            for file, number, function in frames
            for line in (f'    (Python) File "{file}", line {number}, in {function}', "        do()")
        ]
        return text([f"Traceback for thread {pid} (python3) [] (most recent call last):", *lines, ""])

    waits = [
        ("/workspace/run/train.py", 99, "<module>"),
        ("/workspace/run/train.py", 80, "sync"),
        ("/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 2806, "all_reduce"),
    ]
    own = [("/workspace/run/train.py", 99, "<module>"), ("/workspace/run/cache.py", 31, "lookup")]
    hold(
        tmp_path,
        {f"rank{rank}.txt": dump(520 + rank, *(own if rank == 0 else waits)) for rank in range(3)},
        Truth(kinds=("stuck",), ranks=(0,), where="cache.py:31"),
    )


def server(rank_frames: dict[int, tuple[str, ...]], lacking: str = "") -> str:
    lines = []
    for rank, frames in rank_frames.items():
        lines += [
            f"=== Rank {rank}: http://n{rank // 2}:2501{rank}/handler/dump_traceback? ===",
            "Thread 0x00007f11c2a1b740 (most recent call first):",
            *frames,
            "",
            "Current thread 0x00007f11aa7fe700 (most recent call first):",
            "  <no Python frame>",
            "",
        ]
    return text([*([lacking] if lacking else []), *lines])


WAITS = (
    '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce',
    '  File "/workspace/run/train.py", line 80 in sync',
    '  File "/workspace/run/train.py", line 99 in <module>',
)
OWN = ('  File "/workspace/run/cache.py", line 31 in lookup', '  File "/workspace/run/train.py", line 99 in <module>')
STEP = ('  File "/workspace/run/train.py", line {} in step', '  File "/workspace/run/train.py", line 99 in <module>')


def test_two_looks_of_the_debug_server(tmp_path):
    """The same stack in both: stuck."""
    look = server({0: WAITS, 1: OWN, 2: WAITS, 3: WAITS})
    given = {f"dumps/stacks_20260309_14{minute}11.txt": look for minute in (12, 13)}
    hold(tmp_path, given, Truth(kinds=("stuck",), ranks=(1,), where="cache.py:31", confidence=("high", "medium")))


def test_two_looks_at_a_job_that_moves(tmp_path):
    def look(line: int) -> str:
        return server({rank: (STEP[0].format(line + rank), STEP[1]) for rank in range(4)})

    given = {"dumps/stacks_20260309_141211.txt": look(40), "dumps/stacks_20260309_141311.txt": look(60)}
    hold(tmp_path, given, Truth(silent=True))


def test_a_rank_that_did_not_answer(tmp_path):
    look = server(
        {0: WAITS, 1: WAITS, 2: WAITS},
        "PARTIAL DATA: 3/4 workers responded\n  Rank 3: ConnectionError: connection refused\n",
    )
    given = {f"dumps/stacks_20260309_14{minute}11.txt": look for minute in (12, 13)}
    hold(tmp_path, given, Truth(kinds=ABSENT, ranks=(3,), or_cannot_tell=True, collect=("rank 3|other ranks",)))


def test_a_rank_whose_gil_is_held(tmp_path):
    look = server(
        {0: WAITS, 1: WAITS, 2: WAITS},
        "PARTIAL DATA: 3/4 workers responded\n  Rank 3: Timeout: HTTPConnectionPool(host='n1', port=25013): Read timed out.\n",
    )
    hold(
        tmp_path,
        {"dumps/stacks_20260309_141211.txt": look},
        Truth(kinds=ABSENT, ranks=(3,), or_cannot_tell=True, says=("answer|GIL",)),
    )


def test_native_frames(tmp_path):
    native = (
        "c10d::Work::wait (libtorch_cpu.so)",
        "pybind11::cpp_function::dispatcher (libtorch_python.so)",
        *IN_ALL_REDUCE,
    )
    hold(
        tmp_path,
        files(native, native, ("__futex_abstimed_wait_common (libc.so.6)", *LOCK)),
        Truth(kinds=("stuck",), ranks=(2,), where="cache.py:31"),
    )


def test_stacks_of_some_ranks_only(tmp_path):
    """WORLD_SIZE is 8 by the command line; 3 were looked at and wait."""
    given = {
        f"rank{rank}.txt": pyspy(520 + rank, *IN_ALL_REDUCE, command="/opt/venv/bin/python -u train.py --world-size 8")
        for rank in range(3)
    }
    hold(tmp_path, given, Truth(kinds=("transport",), ranks=(), or_cannot_tell=True, collect=("other ranks|all",)))


@pytest.mark.parametrize("state", ["active", "active+gil", "idle"])
def test_a_rank_that_computes_alone(tmp_path, state):
    given = files(IN_BACKWARD, IN_BACKWARD, IN_BACKWARD)
    given["rank1.txt"] = pyspy(521, "pack (packing.py:12)", "main (train.py:90)", state=state)
    hold(tmp_path, given, Truth(kinds=("stuck",), ranks=(1,), where="packing.py:12"))


def test_stacks_and_a_log_that_agree(tmp_path):
    given = {f"stacks/{name}": content for name, content in files(IN_BACKWARD, LOCK, IN_BACKWARD).items()}
    given["job.log"] = "2026-03-09 14:02:11 INFO train: step 30 loss 4.1\n"
    hold(tmp_path, given, Truth(kinds=("stuck",), ranks=(1,), where="cache.py:31", mentions=("30",)))


@pytest.mark.parametrize("name", ["pyspy_{}.txt", "n1{}/pyspy.txt", "job-worker-{}.txt"])
def test_files_that_name_no_rank_are_in_order(tmp_path, name):
    """A launcher starts ranks in order, and pods and hosts have numbers."""
    pids = (520, 521, 522) if name.startswith("pyspy") else (1, 1, 1)
    stacks = (IN_BACKWARD, LOCK, IN_BACKWARD)
    given = {
        name.format(number): pyspy(pid, *stack) for number, (pid, stack) in enumerate(zip(pids, stacks, strict=True))
    }
    hold(tmp_path, given, Truth(kinds=("stuck",), ranks=(1,), where="cache.py:31"))


def test_locals_between_the_frames(tmp_path):
    def dump(pid: int, stack: tuple[str, ...]) -> str:
        more = "        Arguments:\n            self: <Model (cpu)>\n        Locals:\n            paths: (a.py:3)\n"
        head = f'Process {pid}: python train.py\nPython v3.12.9 (/usr/bin/python3.12)\n\nThread {pid} (idle): "MainThread"\n'
        return head + "".join(f"    {frame}\n{more}" for frame in stack)

    given = {f"rank{rank}.txt": dump(520 + rank, LOCK if rank == 1 else IN_ALL_REDUCE) for rank in range(3)}
    hold(tmp_path, given, Truth(kinds=("stuck",), ranks=(1,), where="cache.py:31"))


def test_stacks_that_faulthandler_wrote_into_logs(tmp_path):
    """dump_traceback_later writes them after a time, between the lines of the script."""

    def log(rank: int) -> str:
        frames = OWN if rank == 2 else WAITS
        head = [f"2026-03-09 14:00:{step:02} INFO train: step {step}" for step in range(9)]
        other = [
            "Thread 0x00007f12 (most recent call first):",
            '  File "/usr/lib/python3.12/threading.py", line 355 in wait',
            "",
        ]
        return text([*head, "Timeout (0:10:00)!", *other, "Thread 0x00007f11 (most recent call first):", *frames])

    given = {f"rank_{rank}.log": log(rank) for rank in range(3)}
    hold(tmp_path, given, Truth(kinds=("stuck",), ranks=(2,), where="cache.py:31"))


def test_ctrl_c_in_a_job_that_works_accuses_nobody(tmp_path):
    """Somebody stopped it; who computes at that moment is no culprit."""
    logs = [
        traceback("KeyboardInterrupt", MAIN, *frames, label=f"[rank{rank}]: ")
        for rank, frames in enumerate(
            [(BACKWARD, WRAPPER, ALL_REDUCE), (("/workspace/run/model.py", 8, "forward", "x = x @ w"),)]
        )
    ]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("killed",), ranks=(), or_cannot_tell=True))


# Jobs whose ranks made different calls, as torch's own checks and Gloo tell, and what these do not tell.


def call(rank: int, op: str = "ALLREDUCE", seq: int = 3, shape: str = "4", dtype: str = "Float") -> str:
    return f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber={seq}, OpType={op}, TensorShape=[{shape}], TensorDtypes={dtype}, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu))"


def error(one: str, other: str, aspect: str) -> str:
    return f"RuntimeError: Detected mismatch between collectives on ranks. {one}, but {other}.Collectives differ in the following aspects: \t {aspect}"


@pytest.mark.parametrize(
    ("odd", "aspect"),
    [
        ({"dtype": "Double"}, "Tensor Tensor dtypes: Floatvs Double"),
        ({"op": "BROADCAST"}, "Op type: ALLREDUCEvs BROADCAST"),
        ({"shape": "5"}, "Tensor Tensor shapes: 4vs 5"),
        ({"shape": "2, 4"}, "Tensor Tensor shapes: 4vs 24"),
        ({"seq": 4}, "Sequence number: 3vs 4"),
    ],
)
def test_each_rank_names_one_other(tmp_path, odd, aspect):
    """Rank 1 is the odd one; the others name it, and it names rank 0."""
    calls = [call(rank, **(odd if rank == 1 else {})) for rank in range(4)]
    logs = [raised(error(calls[rank], calls[0 if rank == 1 else 1], aspect), rank) for rank in range(4)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("mismatch",), ranks=(1,), not_ranks=(0, 2, 3)))


def test_old_torch_names_only_itself(tmp_path):
    """torch 2.0: of one rank's text alone nothing can be told."""
    words = "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running inconsistent collective: CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float))"
    hold(tmp_path, text(raised(words, 1)), Truth(collect=("other ranks",)))


def test_the_rank_that_gloo_aborts_is_no_culprit(tmp_path):
    """The one with the larger tensor sees its peer close the connection."""
    log = [
        *steps(3),
        "[rank0]: terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "[rank0]:   what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
    ]
    hold(
        tmp_path,
        interleaved(log, closed_by(1)),
        Truth(kinds=("mismatch",), not_ranks=(0,), says=("a rank: a collective of 8 bytes",)),
    )


def test_a_model_with_other_parameters(tmp_path):
    words = "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {} params."
    logs = [raised(words.format(rank, 212, 2, 214), rank) for rank in (0, 1, 3)] + [
        raised(words.format(2, 214, 0, 212), 2)
    ]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("mismatch",), ranks=(2,)))


@pytest.mark.parametrize("count", ["0", "94103012345"])
def test_parameters_of_a_rank_that_is_gone(tmp_path, count):
    """It is no difference: rank 0 had ended."""
    words = "RuntimeError: DDP expects same model across all ranks, but Rank {} has 212 params, while rank 0 has inconsistent {} params."
    logs = [raised(words.format(rank, count), rank) for rank in (1, 2, 3)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("crash",), ranks=(0,), confidence=("low",), or_cannot_tell=True))


def test_a_port_in_use_in_old_words(tmp_path):
    words = "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use). The server socket has failed to bind to 0.0.0.0:29500 (errno: 98 - Address already in use)."
    hold(tmp_path, text(raised(words, None)), Truth(kinds=("port-free",), says=("29500",)))


def test_a_name_that_cannot_be_resolved(tmp_path):
    words = "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (n000, 29500). The IPv6 network addresses of (n000, 29500) cannot be retrieved (gai error: -2 - Name or service not known)."
    hold(tmp_path, text(raised(words, None)), Truth(kinds=("transport",), ranks=(), says=("n000", "name")))


def test_detail_of_two_ranks_names_both(tmp_path):
    def call(rank, shape):
        return f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[{shape}], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default)))"

    def error(one, other):
        return f"RuntimeError: Detected mismatch between collectives on ranks. {one}, but {other}.Collectives differ in the following aspects: \t Tensor Tensor shapes: 195812480vs 51123456"

    one, other = call(0, "195812480"), call(1, "51123456")
    truth = Truth(kinds=("mismatch",), ranks=(0, 1), confidence=("low", "medium"))
    hold(tmp_path, interleaved(raised(error(one, other), 0), raised(error(other, one), 1)), truth)


def test_a_port_in_use(tmp_path):
    words = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    hold(tmp_path, text(raised(words, None)), Truth(kinds=("port-free",), says=("29500",)))
