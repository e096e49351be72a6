"""What stands before the lines of a log changes nothing of what is said about the job, nor do encodings and line ends."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ddpdoctor.diagnose.evidence import analyze
from ddpdoctor.model.findings import now
from tests.evidence_texts import (
    agent,
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
CODINGS: dict[str, Callable[[str], bytes]] = {
    "CRLF": lambda log: log.replace("\n", "\r\n").encode(),
    "UTF-16 with a mark": lambda log: log.replace("\n", "\r\n").encode("utf-16"),
    "UTF-16 LE": lambda log: log.encode("utf-16-le"),
    "UTF-16 BE": lambda log: log.encode("utf-16-be"),
    "UTF-8 with a mark": lambda log: log.encode("utf-8-sig"),
    "a NUL byte": lambda log: log[:40].encode() + b"\0" + log[40:].encode(),
    "a log that was truncated": lambda log: bytes(200_000) + log.encode(),
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


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_changes_nothing(folder, tmp_path, prefix):
    before = PREFIXES[prefix]
    for name, log in LOGS.items():
        lines = [
            f"{before if isinstance(before, str) else before(number)}{line}"
            for number, line in enumerate(log.removesuffix("\n").split("\n"))
        ]
        assert told(text(lines).encode(), tmp_path) == plain(name, folder), name
        stripped = [line.rstrip() for line in lines]  # as editors do
        assert told(text(stripped).encode(), tmp_path) == plain(name, folder), f"{name}, stripped"


@pytest.mark.parametrize("coding", CODINGS)
def test_an_encoding_changes_nothing(folder, tmp_path, coding):
    for name, log in LOGS.items():
        assert told(CODINGS[coding](log), tmp_path) == plain(name, folder), name
