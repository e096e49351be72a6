"""Writes what torch's flight recorder would have dumped of a synthetic job under NCCL: a pickle a rank."""

import pickle
from pathlib import Path
from typing import Any

from tests.synthetic import LAUNCHED, SCRIPT, TORCH, Job, Tape, tape_of

BUCKET = (262_144,)
"""Elements of the bucket that DDP's backward reduces."""

DESCRIPTIONS = {"world": "default_pg", "tp": "tp", "dp": "dp"}


def write_dumps(folder: Path, job: Job) -> None:
    """Write the dumps of all ranks, as ``torchfrtrace`` reads them."""
    folder.mkdir(parents=True)
    for rank in range(job.world):
        dump = {
            "version": "2.10", "comm_lib_version": "2.29.7", "pg_config": groups_of(job, rank), "pg_status": {},
            "entries": entries_of(job, rank, tape_of(job, rank)),
        }  # fmt: skip
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))


def groups_of(job: Job, rank: int) -> dict[str, dict[str, str]]:
    """Return the groups of a rank as a dump has them."""
    return {
        job.name(rank, kind): {
            "name": job.name(rank, kind), "desc": DESCRIPTIONS[kind], "ranks": str(list(job.members(rank, kind)))
        }
        for kind in (("world", "tp", "dp") if job.tp else ("world",))
    }  # fmt: skip


def entries_of(job: Job, rank: int, tape: Tape) -> list[dict[str, Any]]:
    """Return an entry for each collective of a rank, DDP's own among them."""
    last = len(tape.collectives)
    found = []
    for number, (event, kind, seq) in enumerate(tape.collectives, start=1):
        done = not (tape.open and number == last)
        size = list(BUCKET if event.native else event.dims or (1,))
        name = "nccl:barrier" if event.op == "barrier" else "nccl:all_reduce"
        at = LAUNCHED + number
        found.append({
            "frames": frames_of(event.line), "record_id": number - 1, "pg_id": int(job.name(rank, kind)),
            "process_group": (job.name(rank, kind), DESCRIPTIONS[kind]), "collective_seq_id": seq, "p2p_seq_id": 0,
            "is_p2p": False, "op_id": seq, "profiling_name": name,
            "input_sizes": [size], "input_dtypes": ["Float"], "output_sizes": [size], "output_dtypes": ["Float"],
            "state": "completed" if done else "started", "retired": done, "timeout_ms": 600_000,
            "time_created_ns": at, "time_discovered_started_ns": at,
            "time_discovered_completed_ns": at if done else None, "thread_id": "1", "thread_name": "main",
        })  # fmt: skip
    return found


def frames_of(line: int) -> list[dict[str, Any]]:
    """Return the frames of an entry, innermost first."""
    return [
        {"name": "all_reduce", "filename": f"{TORCH}/distributed/distributed_c10d.py", "line": 3000},
        {"name": "wrapper", "filename": f"{TORCH}/distributed/c10d_logger.py", "line": 83},
        {"name": "main", "filename": SCRIPT, "line": line},
        {"name": "<module>", "filename": SCRIPT, "line": 60},
    ]
