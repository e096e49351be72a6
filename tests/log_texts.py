"""Texts that programs leave in logs: torch's watchdog, Gloo, torchrun, NCCL, its RAS, py-spy. Each gives lines."""

from __future__ import annotations

import json
from itertools import groupby, zip_longest

SITE = "/opt/venv/lib/python3.12/site-packages"
BAR = "=" * 60
RULE = "-" * 60
DEFAULT = "PG ID 0 PG GUID 0(default_pg)"
LIMIT_MS = 600000


def interleaved(*logs: list[str]) -> str:
    """Return the lines of several writers in turn, as they come out of one pipe."""
    return text(_in_turn(logs))


def _in_turn(logs) -> list[str]:
    return [line for lines in zip_longest(*logs) for line in lines if line is not None]


def text(lines) -> str:
    return "\n".join(lines) + "\n"


def labeled(labels, lines: list[str]) -> list[str]:
    return [f"{labels}{line}" for line in lines]


def steps(count: int, first: int = 1) -> list[str]:
    return [
        f"2026-03-09 14:{number // 60 % 60:02}:{number % 60:02} INFO train: step {number} loss {4 - number / 100:.4f} lr 3.0e-04"
        for number in range(first, first + count)
    ]


# torch's watchdog


def work(
    seq: int, op: str = "ALLREDUCE", numel: int = 1048576, out: int | None = None, limit_ms: int = LIMIT_MS
) -> str:
    return f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={out or numel}, Timeout(ms)={limit_ms})"


def caught(call: str, ran_ms: int = LIMIT_MS + 48) -> str:
    return f"Watchdog caught collective operation timeout: {call} ran for {ran_ms} milliseconds before timing out."


def old_watchdog(rank: int, call: str, torch: str = "2.2") -> list[str]:
    """torch 2.1 and 2.2: no global rank, no group, no time."""
    thread = "NCCL watchdog thread terminated with exception"
    error = "std::runtime_error" if torch == "2.1" else "c10::DistBackendError"
    return [
        f"[E ProcessGroupNCCL.cpp:475] [Rank {rank}] {caught(call)}",
        "[E ProcessGroupNCCL.cpp:489] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.",
        "[E ProcessGroupNCCL.cpp:495] To avoid data inconsistency, we are taking the entire process down.",
        f"[E ProcessGroupNCCL.cpp:916] [Rank {rank}] {thread}: [Rank {rank}] {caught(call)}",
        f"terminate called after throwing an instance of '{error}'",
        f"  what():  [Rank {rank}] {thread}: [Rank {rank}] {caught(call)}",
    ]


def watchdog(
    rank: int,
    call: str,
    *,
    torch: str = "2.6",
    group: str | None = None,
    group_rank: int | None = None,
    spoken: int | None = None,
    enqueued: int | None = None,
    completed: int | str | None = None,
    stack: list[str] | None = None,
) -> list[str]:
    """torch 2.3 to 2.13. ``spoken`` is the rank in "[Rank 2]", which may be that of another group."""
    seq = int(call.partition("SeqNum=")[2].partition(",")[0])
    group = group or {"2.3": "PG 0", "2.4": "PG 0 (default_pg)"}.get(torch, DEFAULT)
    place = rank if group_rank is None else group_rank
    spoken = place if spoken is None else spoken
    enqueued = seq if enqueued is None else enqueued
    completed = seq - 1 if completed is None else completed
    time = "" if torch == "2.3" else f"309 14:12:11.{19022791 + rank:09}"
    head = f"[rank{rank}]:[E{time} ProcessGroupNCCL.cpp:632] "
    numbers = f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    lines = [f"{head}[Rank {spoken}] {caught(call)}"]
    if torch in {"2.4", "2.5"}:
        lines += [
            f"{head}[{group} Rank {place}] Exception (either an error or timeout) detected by watchdog at work: {seq}, {numbers}"
        ]
    if torch in {"2.3", "2.4", "2.5"}:
        lines += [f"{head}[{group} Rank {place}] Timeout at NCCL work: {seq}, {numbers}"]
    else:
        lines += [
            f"{head}[{group} Rank {place}]  failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, last completed work: {completed}"
        ]
        lines += (
            [f"{head}Stack trace of the failed collective: ", *stack, ""]
            if stack
            else [
                f"{head}Stack trace of the failed collective not found, potentially because FlightRecorder is disabled. You can enable it by setting TORCH_NCCL_TRACE_BUFFER_SIZE to a non-zero value."
            ]
        )
        lines += [f"{head}[{group} Rank {place}] First PG on this rank to signal dumping."]
    return [
        *lines,
        f"{head}[Rank {spoken}] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.",
        f"{head}[Rank {spoken}] To avoid data inconsistency, we are taking the entire process down.",
        f"{head}[{group} Rank {place}] Process group watchdog thread terminated with exception: [Rank {spoken}] {caught(call)}",
        "Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632 (most recent call first):",
        f"frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f2ac9b6c1b6 in {SITE}/torch/lib/libc10.so)",
    ]


def dump_signal(rank: int, source: int, enqueued: int, completed: int) -> list[str]:
    """What a rank says that is asked to dump. The numbers are those of the default group."""
    head = f"[rank{rank}]:[E309 14:12:13.000000076 ProcessGroupNCCL.cpp:1743] [{DEFAULT} Rank {rank}] "
    return [
        f"{head}Observed flight recorder dump signal from another rank via TCPStore.",
        f"{head}Received a dump signal due to a collective timeout from  rank {source} and we will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is most likely caused by incorrect usages of collectives, e.g., wrong sizes used across ranks, the order of collectives is not same for all ranks or the scheduled collective, for some reason, didn't run.",
        f"{head}ProcessGroupNCCL preparing to dump debug info. Include stack trace: 1, only active collectives: 0",
    ]


def nccl2_timeout(rank: int) -> list[str]:
    """torch 2.15's nccl2: neither number nor operation."""
    head = f"[rank{rank}]:[E309 14:12:11.019022791 Comm.cpp:412] [TC][rank={rank}][name=default_pg] "
    return [
        f"{head}Watchdog caught collective operation timeout: NCCL operation timed out",
        f"{head}FlightRecorderHook: dumping trace on collective failure",
        f"{head}Aborting process on rank {rank} due to timeout - timeout watchdog detected operation timeout",
    ]


# Python and Gloo


def traceback(error: str, *frames: tuple[str, int, str, str], label: str = "") -> list[str]:
    """Return a traceback: frames are file, line, function and source."""
    lines = ["Traceback (most recent call last):"]
    for file, line, function, source in frames:
        lines += [f'  File "{file}", line {line}, in {function}', f"    {source}"]
    return [f"{label}{line}" for line in (*lines, *error.split("\n"))]


WRAPPER = (f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper", "return func(*args, **kwargs)")
ALL_REDUCE = (f"{SITE}/torch/distributed/distributed_c10d.py", 3252, "all_reduce", "work.wait()")
BARRIER = (f"{SITE}/torch/distributed/distributed_c10d.py", 4810, "barrier", "work.wait()")
BACKWARD = ("/workspace/run/train.py", 61, "main", "loss.backward()")
MAIN = ("/workspace/run/train.py", 99, "<module>", "main()")
GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
CRASHING = "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"


def closed_by(rank: int, peer: str = "127.0.0.1", port: int = 61594) -> list[str]:
    error = f"{GLOO}pair.cc:553] Connection closed by peer [{peer}]:{port}. {CRASHING}"
    return traceback(error, MAIN, BACKWARD, WRAPPER, ALL_REDUCE, label=f"[rank{rank}]: ")


def gloo_timeout(rank: int, ms: int = 8000) -> list[str]:
    error = f"{GLOO}unbound_buffer.cc:78] Timed out waiting {ms}ms for recv operation to complete"
    return traceback(error, MAIN, BACKWARD, WRAPPER, ALL_REDUCE, label=f"[rank{rank}]: ")


def raised(error: str, rank: int | None, line: int = 40, source: str = "scale = 1 / n_valid") -> list[str]:
    label = "" if rank is None else f"[rank{rank}]: "
    return traceback(error, MAIN, ("/workspace/run/train.py", line, "main", source), label=label)


# torchrun


def agent(code: int, local_rank: int, pid: int, stopped: list[int] = []) -> list[str]:  # noqa: B006
    head = "0309 14:02:19.000000 4011 torch/distributed/elastic/multiprocessing/api.py"
    return [
        *(f"W{head}:1028] Sending process {other} closing signal SIGTERM" for other in stopped),
        f"E{head}:1002] failed (exitcode: {code}) local_rank: {local_rank} (pid: {pid}) of binary: /opt/venv/bin/python",
    ]


def table(
    *failures: tuple[int, int, int, str], host: str = "localhost", local: int = 8, script: str = "train.py"
) -> list[str]:
    """Return torchrun's table: rank, exit code, pid and traceback; the last one is the root cause."""
    lines = [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        BAR,
        f"{script} FAILED",
        RULE,
        "Failures:",
    ]
    lines += [line for failure in failures[:-1] for line in _failure(failure, host, local)] or ["  <NO_OTHER_FAILURES>"]
    return [*lines, RULE, "Root Cause (first observed failure):", *_failure(failures[-1], host, local), BAR]


_SIGNALS = {-15: " (SIGTERM)", -9: " (SIGKILL)", -6: " (SIGABRT)", -11: " (SIGSEGV)", -7: " (SIGBUS)"}


def _failure(failure: tuple[int, int, int, str], host: str, local: int) -> list[str]:
    rank, code, pid, said = failure
    signal = _SIGNALS.get(code, "")
    words = f"Signal {-code}{signal} received by PID {pid}" if code < 0 else ""
    said = said or words or "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    return [
        f"[{rank % local}]:",
        "  time      : 2026-03-09_14:02:19",
        f"  host      : {host}",
        f"  rank      : {rank} (local_rank: {rank % local})",
        f"  exitcode  : {code} (pid: {pid}) {signal}",
        "  error_file: <N/A>",
        *f"  traceback : {said}".replace("\n", "\n  ").split("\n"),
    ]


# NCCL


def nccl(host: str, pid: int, said: str, gpu: int = 0) -> str:
    return f"{host}:{pid}:{pid + 900} [{gpu}] NCCL INFO {said}"


def nccl_start(
    host: str, address: str, pid: int, *, rank: int, ranks: int, gpu: int = 0, network: str = "Socket"
) -> list[str]:
    """Return what a healthy process says until its communicator is there."""
    comm = f"comm 0x55d1000{rank:x}a0 rank {rank} nranks {ranks} cudaDev {gpu} nvmlDev {gpu} busId {gpu + 1:x}a000 commId 0x6e1f2c9a7d"
    return [
        nccl(host, pid, f"Bootstrap: Using eth0:{address}<0>", gpu),
        nccl(host, pid, "NET/Plugin: Could not find: libnccl-net.so.", gpu),
        nccl(host, pid, "NET/IB : No device found.", gpu),
        nccl(host, pid, f"Using network {network}", gpu),
        nccl(host, pid, f"ncclCommInitRankConfig {comm} - Init START", gpu),
        nccl(host, pid, f"ncclCommInitRankConfig {comm} - Init COMPLETE", gpu),
    ]


def nccl_warn(host: str, pid: int, said: str, gpu: int = 0, place: str = "misc/socket.cc:533") -> list[str]:
    """NCCL up to 2.26 writes an empty line before."""
    return ["", f"{host}:{pid}:{pid + 900} [{gpu}] {place} NCCL WARN {said}"]


# stacks


PIN_MEMORY = """\

Thread 529 (idle): "Thread-1 (_pin_memory_loop)"
    wait (threading.py:331)
    _pin_memory_loop (torch/utils/data/_utils/pin_memory.py:54)
"""


def pyspy(
    pid: int, *frames: str, state: str = "idle", command: str = "/opt/venv/bin/python -u train.py", others: str = ""
) -> str:
    lines = [
        f"Process {pid}: {command}",
        "Python v3.12.9 (/usr/local/bin/python3.12)",
        "",
        f'Thread {pid} ({state}): "MainThread"',
        *(f"    {frame}" for frame in frames),
    ]
    return text(lines) + others


IN_BACKWARD = (
    "_engine_run_backward (torch/autograd/graph.py:829)",
    "backward (torch/autograd/__init__.py:353)",
    "backward (torch/_tensor.py:626)",
    "train_step (train.py:77)",
    "main (train.py:99)",
)
IN_ALL_REDUCE = (
    "all_reduce (torch/distributed/distributed_c10d.py:2806)",
    "wrapper (torch/distributed/c10d_logger.py:83)",
    "sync_metrics (train.py:80)",
    "main (train.py:99)",
)
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
WAITS = (
    '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce',
    '  File "/workspace/run/train.py", line 80 in sync',
    '  File "/workspace/run/train.py", line 99 in <module>',
)
OWN = ('  File "/workspace/run/cache.py", line 31 in lookup', '  File "/workspace/run/train.py", line 99 in <module>')


# RAS, DeepSpeed, Slurm, progress bars, the debug server


def at(minute: int, lines: list[str]) -> list[str]:
    """Return the lines as of another minute of that hour; the first ranks ran into their limits at 12."""
    return [line.replace(" 14:12:", f" 14:{minute}:") for line in lines]


def deepspeed(code: int, local: int, ranks: int = 4) -> list[str]:
    head = "[2026-03-09 14:02:1{},111] [INFO] [launch.py:{}:{}] "
    command = "['/opt/venv/bin/python', '-u', 'train.py', '--local_rank={}', '--deepspeed', 'ds.json']"
    start = [
        head.format(1, 256, "main") + f"process {900 + rank} spawned with command: {command.format(rank)}"
        for rank in range(ranks)
    ]
    end = [head.format(9, 319, "sigkill_handler") + f"Killing subprocess {900 + rank}" for rank in range(ranks)]
    return [
        *start,
        *steps(4),
        *end,
        f"[2026-03-09 14:02:19,111] [ERROR] [launch.py:325:sigkill_handler] {command.format(local)} exits with return code = {code}",
    ]


def bar(words: str, share: int = 71) -> str:
    return f"\r{words}: {share}%|███████   | {share}00/10000 [29:14<12:10, 5.5 examples/s]"


def tasks(count: int, lines: list[str]) -> list[str]:
    return [f"{task}: {line}" for line in lines for task in range(count)]


RAS = """\
NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      {nodes}          {per}            1         {all}       {all}

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         {nodes}         {per}        {all}        {all}   RUNNING  {errors}{more}

Errors
======
"""


def ras(errors="MISMATCH", *, nodes=4, per=8, second=False) -> list[str]:
    """Return the answer of a job, up to its errors."""
    more = "\n    1         8         4         1         4        32   RUNNING      OK" if second else ""
    return RAS.format(nodes=nodes, per=per, all=nodes * per, errors=errors, more=more).split("\n")


def ras_behind(rank: int, number: int) -> list[str]:
    return [
        *ras(nodes=2, per=4),
        "",
        "Warnings",
        "========",
        "",
        "#0-0 (6e1f2c9a7d001122) MISMATCH",
        "  Communicator ranks have different AllReduce operation counts",
        f"  7 ranks have launched up to operation {number + 1}",
        f"  Rank {rank} has launched up to operation {number} -- GPU 3 managed by process 41207 on node 10.0.3.2",
        "",
    ]


def ras_json(counts: dict[int, int], missing: dict[int, bool] | None = None) -> str:
    def one(rank: int, status: str, more: str = "") -> str:
        return f'{{"rank": {rank}, "host": "10.0.3.{1 + rank // 4}", "pid": {41200 + rank}, "cuda_dev": {rank % 4}, "nvml_dev": {rank % 4}, "status": {{{status}}}{more}}}'

    well = '"init_state": 0, "async_error": 0, "finalize_called": false, "destroy_flag": false, "abort_flag": false'
    calls = ', "collective_counts": {"Broadcast": 2, "Reduce": 0, "AllGather": 10, "ReduceScatter": 10, "AllReduce": '
    ranks = [one(rank, well, f"{calls}{number}}}") for rank, number in counts.items()]
    lost = [
        one(rank, f'"unresponsive": true, "considered_dead": {json.dumps(dead)}')
        for rank, dead in (missing or {}).items()
    ]
    size = f'"size": {len(ranks) + len(lost)}, "ranks_count": {len(ranks)}, "missing_ranks_count": {len(lost)}'
    comm = f'{{"hash": "0x6e1f2c9a7d", {size}, "ranks": [{", ".join(ranks)}], "missing_ranks": [{", ".join(lost)}]}}'
    return f'{{"nccl_version": "2.28.7", "cuda_runtime_version": 12090, "communicators": [{comm}], "ras": {{"collection_time_sec": 0.01, "timeouts_count": 0}}}}'


def pyspy_json(pid: int, stack: tuple[str, ...]) -> str:
    frames = []
    for frame in stack:
        name, _, place = frame.rstrip(")").partition(" (")
        file, _, line = place.rpartition(":")
        path = f"{SITE if 'torch' in file else '/workspace/run'}/{file}"
        frames.append(
            f'{{"name": "{name}", "filename": "{path}", "module": null, "short_filename": "{file}", "line": {line}, "locals": null, "is_entry": false, "is_shim_entry": false}}'
        )
    thread = f'"pid": {pid}, "thread_id": 140, "thread_name": "MainThread", "os_thread_id": {pid}, "active": false, "owns_gil": false'
    return f'[{{{thread}, "frames": [{", ".join(frames)}], "process_info": null}}]'


def debug_server(rank_frames: dict[int, tuple[str, ...]], lacking: str = "") -> str:
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


# Cases in tests/data


def _logs_of(line):
    """Return the lines of each writer: "@ steps(9)", "@0-2,5 watchdog(rank, work(7))"."""
    ranks, _, text = line[1:].partition(" ")
    spans = [[int(end) for end in span.split("-")] for span in ranks.split(",") if span]
    logs = []
    for rank in [rank for first, *last in spans for rank in range(first, (last or [first])[0] + 1)] or [None]:
        found = eval(text, {**globals(), "rank": rank})
        logs.append(found if isinstance(found, list) else found.removesuffix("\n").split("\n"))
    return logs


def written(lines):
    """Return the lines of a case in tests/data, which stand as programs write them, save these:

    @ steps(30)                 the lines of a text of this module
    @0-2,5 watchdog(rank, ...)  those of several ranks in turn, as they come out of one pipe
    & dump_signal(3, ...)       in turn with those above
    @[ ... @, ... @]            several logs in turn
    @ ["a line "]               a line with characters that an editor does not show
    """
    found, rest = [], list(lines)
    while rest:
        line = rest.pop(0)
        if line == "@[":
            end = rest.index("@]")
            logs = [list(log) for is_end, log in groupby(rest[:end], "@,".__eq__) if not is_end]
            found += _in_turn(map(written, logs))
            del rest[: end + 1]
        elif line.startswith("@"):
            logs = _logs_of(line)
            while rest and rest[0].startswith("&"):
                logs += _logs_of(rest.pop(0))
            found += _in_turn(logs)
        else:
            found.append(line)
    return found
