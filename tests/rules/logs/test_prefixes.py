"""What stands before the lines of a log changes nothing of what is said about the job, nor do encodings and line ends."""

# ruff: noqa: ARG005 - all of a table take the same arguments
from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ddpdoctor.diagnose.logs import analyze
from ddpdoctor.model.findings import now
from tests.log_texts import (
    agent,
    caught,
    closed_by,
    interleaved,
    nccl_start,
    nccl_warn,
    old_watchdog,
    raised,
    steps,
    table,
    text,
    watchdog,
    work,
)
from tests.rules.logs.truths import ABSENT, Truth, hold

CUDA = [
    "[rank13]:[E309 14:24:07.000000198 ProcessGroupNCCL.cpp:2057] [PG ID 3 PG GUID 27(tp) Rank 1] Process group watchdog "
    "thread terminated with exception: CUDA error: unspecified launch failure",
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "",
    "Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:43 (most recent call first):",
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f61a3c1b6a0 in /opt/lib/libc10.so)",
]
KEY = "KeyError: 'labels'"
LOGS = {
    "a rank of a group": text([*steps(3), *CUDA]),
    "one line": CUDA[0],
    "a traceback without rank": text([*steps(3), *raised(KEY, None)]),
    "a short paste": text(raised(KEY, None)),
    "tracebacks that mix": interleaved(steps(6), raised(KEY, 1), closed_by(0), closed_by(2)),
    "a table": text([*steps(3), *agent(-9, 1, 16222, [16221, 16223]), *table((1, -9, 16222, ""))]),
    "watchdogs": interleaved(*(watchdog(rank, work(71)) for rank in range(3)))
    + text(["[rank3]: TypeError: 'NoneType' object is not iterable"]),
    "old watchdogs": interleaved(*(old_watchdog(rank, work(512)) for rank in range(2))),
    "NCCL": text([*nccl_start("h1", "10.0.0.1", 100, rank=0, ranks=2), *nccl_warn("h1", 100, "Cuda failure 2 'out of memory'")]),
    "progress": text(steps(30)),
    "the end": text([*steps(30), "`Trainer.fit` stopped: `max_steps=33` reached."]),
    "two runs": text([
        "NCCL version 2.27.3+cuda12.9", *steps(3), *raised("OSError: [Errno 5] Input/output error", 0),
        "NCCL version 2.27.3+cuda12.9", *steps(3), *raised(KEY, 1),
    ]),
}  # fmt: skip


def at(line: int) -> datetime:
    return datetime(2026, 3, 9, 14, 25, 47, tzinfo=timezone.utc) + timedelta(milliseconds=11 * line)


def iso(line: int, form: str = "%Y-%m-%dT%H:%M:%S.%f") -> str:
    return at(line).strftime(form)


PREFIXES: dict[str, str | Callable[[int], str]] = {
    "stderr": "stderr: ",
    "CRI": lambda line: f"{iso(line)}318Z stderr F ",
    "kubectl logs --timestamps": lambda line: f"{iso(line)}318Z ",
    "stern": "llm-worker-zz pytorch ",
    "docker compose": "trainer  | ",
    "docker service logs": "llm_trainer.1.x9a8b7c6d5e4@gpu    | ",
    "GitHub Actions": lambda line: f"{iso(line)}0Z ",
    "gh run view --log": lambda line: f"train\tRun training\t{iso(line)}0Z ",
    "GitLab": lambda line: f"{iso(line)}Z 01O ",
    "Jenkins": lambda line: f"[{iso(line)[:-3]}Z] ",
    "Heroku": lambda line: f"{iso(line)}+00:00 app[worker.one]: ",
    "RFC 5424": lambda line: f"<134>1 {iso(line)}Z gpu train 4711 - - ",
    "syslog without host": lambda line: iso(line, "%b %d %H:%M:%S "),
    "loguru": lambda line: f"{iso(line)[:-3].replace('T', ' ')} | ERROR    | trainer.launch:pump:88 - ",
    "logging": lambda line: iso(line, "%Y-%m-%d %H:%M:%S,000 - trainer - ERROR - "),
    "logging with the level first": "ERROR:trainer.pump:",
    "logging of Hydra": lambda line: iso(line, "[%Y-%m-%d %H:%M:%S,000][trainer][ERROR] - "),
    "Transformers": lambda line: iso(line, "%m/%d/%Y %H:%M:%S - ERROR - trainer.pump - "),
    "absl": lambda line: iso(line, "I%m%d %H:%M:%S.%f 139872 pump.py:88] "),
    "vLLM": lambda line: iso(line, "ERROR %m-%d %H:%M:%S worker_base.py:612] "),
    "vLLM's engine": lambda line: iso(line, "(EngineCore_DP0 pid=4242) ERROR %m-%d %H:%M:%S [core.py:612] "),
    "vLLM's worker": "(Worker_TP0 pid=4242) ",
    "Ray": "\x1b[36m(RayTrainWorker pid=19799)\x1b[0m ",
    "SkyPilot": "(head, pid=4242) ",
    "TorchX": "trainer/0 ",
    "NeMo-run": "i.pretrain/0 ",
    "NeMo-run in a container": lambda line: f"{iso(line)}318Z stderr F i.dpo/0 ",
    "Kaggle": lambda line: f"{811.3 + line / 10:.1f}s\t{940 + line}\t",
    "seconds": lambda line: f"{1773066347 + line / 100:.3f} ",
    "line numbers": lambda line: f"{97 + line}: ",
    "line numbers in a column": lambda line: f"{97 + line:6d}  ",
    "line numbers and a bar": lambda line: f"{97 + line:4d} | ",
    "grep -n": lambda line: f"{97 + line}:",
    "grep in a folder": "logs/train.log:",
    "a quote": "> ",
    "a quote in a quote": "> > ",
    "indentation": "    ",
    "a tab": "\t",
    "an identifier": "[3f2a9c1e-77aa-4b1c-9d2e-0a1b2c3d4e5f] ",
}


def packed(log: str, record: Callable[[str], dict[str, str]]) -> bytes:
    return "".join(json.dumps(record(line)) + "\n" for line in log.removesuffix("\n").split("\n")).encode()


CODINGS: dict[str, Callable[[str], bytes]] = {
    "CRLF": lambda log: log.replace("\n", "\r\n").encode(),
    "UTF-16 with a mark": lambda log: log.replace("\n", "\r\n").encode("utf-16"),
    "UTF-16 LE": lambda log: log.encode("utf-16-le"),
    "UTF-16 BE": lambda log: log.encode("utf-16-be"),
    "UTF-8 with a mark": lambda log: log.encode("utf-8-sig"),
    "a NUL byte": lambda log: log[:40].encode() + b"\0" + log[40:].encode(),
    "a log that was truncated": lambda log: bytes(200_000) + log.encode(),
    "docker's JSON": lambda log: packed(
        log, lambda line: {"log": f"{line}\n", "stream": "stderr", "time": f"{iso(0)}321Z"}
    ),
    "Google Cloud's JSON": lambda log: packed(
        log, lambda line: {"insertId": "a7", "textPayload": line, "timestamp": iso(0)}
    ),
}


def told(log: bytes, folder: Path) -> object:
    """Return what the report says about the job, with the lines that show it, without what stands before a text."""
    path = folder / "job.log"
    path.write_bytes(log)
    report = analyze([str(path)], ("ddpdoctor", "analyze"), now())
    verdict = report.verdict
    ranks = [(row.rank, row.state, row.where) for row in report.ranks]
    if verdict is None:
        return ranks, [check.outcome for check in report.checks]
    lines = sorted({int(line) for line in re.findall(r"job\.log:(\d+)", "\n".join(verdict.evidence))})
    return ranks, verdict.kind, verdict.ranks, verdict.where, verdict.summary, verdict.confidence, lines


@functools.cache
def plain(name: str, folder: Path) -> object:
    return told(LOGS[name].encode(), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


def some(number: int) -> dict[str, str]:
    """Return two logs that are always tried, and of the others a third."""
    always = ("one line", "a traceback without rank")
    return {name: LOGS[name] for name in (*always, *[name for name in LOGS if name not in always][number % 3 :: 3])}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_changes_nothing(folder, tmp_path, prefix):
    before = PREFIXES[prefix]
    for name, log in some([*PREFIXES].index(prefix)).items():
        lines = [
            f"{before if isinstance(before, str) else before(number)}{line}"
            for number, line in enumerate(log.removesuffix("\n").split("\n"))
        ]
        assert told(text(lines).encode(), tmp_path) == plain(name, folder), name
        stripped = [line.rstrip() for line in lines]  # as editors do
        if stripped != lines:
            assert told(text(stripped).encode(), tmp_path) == plain(name, folder), f"{name}, stripped"


@pytest.mark.parametrize("coding", CODINGS)
def test_an_encoding_changes_nothing(folder, tmp_path, coding):
    for name, log in some([*CODINGS].index(coding)).items():
        assert told(CODINGS[coding](log), tmp_path) == plain(name, folder), name


@pytest.mark.parametrize("broken", ['{"log": ' + "[" * 30_000, '{"log": ' + "[" * 9000 + "]" * 9000 + "}"])
def test_a_line_that_only_looks_like_a_record_is_a_line(tmp_path, broken):
    hold(tmp_path, text([broken, *raised(KEY, 1)]), Truth(kinds=("crash",), ranks=(1,), where="train.py:40"))


WRITERS: dict[str, tuple[Callable[[int, int], str], bool]] = {
    "TorchX": (lambda rank, line: f"trainer/{rank} ", False),
    "vLLM": (lambda rank, line: f"(Worker_TP{rank} pid={400 + rank}) ERROR 03-09 14:25:{line:02} [base.py:61] ", False),
    "docker compose": (lambda rank, line: f"{('alpha', 'beta', 'gamma')[rank]}  | ", False),
    "kubectl logs --prefix": (lambda rank, line: f"[pod/llm-{rank}/pytorch] {iso(line)}Z ", False),
    "nodes": (lambda rank, line: f"[node-{rank + 10}] stderr: ", False),
    "a number in a group": (lambda rank, line: f"[Rank {rank}] ", False),
    "a number in a group by its words": (lambda rank, line: f"[dp rank {rank}] ", False),
    "a number in a group and a colon": (lambda rank, line: f"TP rank {rank}: ", False),
    "numbers of nodes": (lambda rank, line: f"(worker{rank + 1}, rank={rank + 1}, pid={70 + rank}) ", False),
    "numbers of nodes by their words": (lambda rank, line: f"[node-rank={rank}] ", False),
    "the rank behind that of a group": (lambda rank, line: f"tp rank 0 global_rank={rank} | ", True),
    "local ranks by their words": (lambda rank, line: f"[local rank {rank}] ", True),
    "process ids": (lambda rank, line: f"I0309 14:25:47.{line:06} {4000 - rank} pump.py:88] ", False),
    "srun --label": (lambda rank, line: f"14:25:{line:02} {rank}: ", True),
    "mpirun": (lambda rank, line: f"[1,{rank}]<stderr>:", True),
    "SageMaker": (lambda rank, line: f"[1,mpirank:{rank},algo-{rank // 2}]<stderr>:", True),
    "logging with a rank": (lambda rank, line: iso(line, f"%H:%M:%S,000 - trainer - rank={rank} - ERROR - "), True),
    "torchrun in a container": (lambda rank, line: f"{iso(line)}Z stdout F [default{rank}]:", True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_tracebacks_that_mix_are_told_apart_by_what_stands_before_their_lines(tmp_path, name):
    """A rank is named only by what is certainly one."""
    before, names_rank = WRITERS[name]
    own = raised(KEY, None, line=12)
    victims = [closed_by(rank, port=61590 + rank) for rank in (0, 1)]
    lines = interleaved(
        *([f"{rank}{line.removeprefix(f'[rank{rank}]: ')}" for line in log] for rank, log in enumerate([*victims, own]))
    ).removesuffix("\n")
    log = text(f"{before(int(line[0]), number)}{line[1:]}" for number, line in enumerate(lines.split("\n")))
    truth = Truth(kinds=("crash",), ranks=(2,) if names_rank else (), says=("KeyError", "train.py:12"))
    hold(tmp_path, log, truth)


BAR = "Epoch 0:   6%|█         | 32040/500150 [6:28:43<94:39:17,  1.37it/s, loss=2.6]"


def test_watchdogs_that_wrote_into_one_line_and_after_a_bar(tmp_path):
    heads = "".join(f"[E ProcessGroupNCCL.cpp:475] [Rank {rank}] {caught(work(71))}" for rank in range(3))
    report = hold(tmp_path, text([BAR + heads]), Truth(or_cannot_tell=True, kinds=(*ABSENT, "transport"), ranks=()))
    assert [row.rank for row in report.ranks] == [0, 1, 2]


def later(lines: list[str], month: int) -> list[str]:
    """Return lines with the dates of another month."""
    return [line.replace("2026-03-", f"2026-{month:02}-").replace("[E309", f"[E{month}09") for line in lines]


JOBS = {
    "months apart": ({}, 5),
    "ports": ({"a": "MASTER_PORT=29511", "b": "MASTER_PORT=29533"}, 3),
    "run ids": ({"a": "  run_id           : 71a", "b": "  run_id           : 80f"}, 3),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs_in_one_folder_are_told_apart_by_what_they_say(tmp_path, name):
    """Rank 0 of the first job is no rank of the second, in which nothing shows that it did not come."""
    heads, month = JOBS[name]
    first = [heads.get("a", ""), *steps(5), *watchdog(0, work(66)), *raised("OSError: [Errno 5] Input/output error", 1)]
    second = [heads.get("b", ""), *later(steps(90), month), *later(raised(KEY, 2), month)]
    files = {"a/tail.log": text(first), "b/tail.log": text(second)}
    report = hold(tmp_path, files, Truth(kinds=("crash",), ranks=(2,), says=("KeyError",)))
    assert [row.rank for row in report.ranks] == [2]
    assert report.data["evidence"]["runs"] == 2


def test_files_of_one_job_stay_together(tmp_path):
    """One node is nine hours behind, in another time zone, and each has a run of its own in a tracker."""
    behind = [line.replace(" 14:", " 05:") for line in steps(30)]
    files = {
        "n0.log": text(["mlflow run_id: a71c", *steps(30), *raised(KEY, 0)]),
        "n1.log": text(["mlflow run_id: 90ff", *behind, *closed_by(1)]),
    }
    report = hold(tmp_path, files, Truth(kinds=("crash",), ranks=(0,)))
    assert report.data["evidence"]["runs"] == 1
