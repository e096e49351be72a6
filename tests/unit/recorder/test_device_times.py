"""Where torch times its kernels, a rank notes the times before it ends its groups, and asks no device elsewhere."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from .test_flight import PROGRAM

NOTE = """
from ddpdoctor.recorder.state import here
here.ring = types.SimpleNamespace(note=lambda entry, **more: print(json.dumps(entry)))
flight.note_times()
"""
ENTRY = {
    "process_group": ["0", ""], "collective_seq_id": 3, "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce",
    "state": "completed", "retired": True, "time_created_ns": 1, "is_p2p": False, "duration_ms": 2.5,
}  # fmt: skip
QUEUED = {**ENTRY, "collective_seq_id": 4, "state": "scheduled", "retired": False}


@pytest.mark.parametrize(("timing", "rows"), [("1", [["0", 3, "all_reduce", 2.5]]), ("0", None)])
def test_times_are_noted_where_torch_has_them(timing: str, rows: list[Any] | None) -> None:
    build = {"version": "2.13.0", "nccl": True, "docs": {}, "dumps": {"own": {"entries": [ENTRY, QUEUED]}}}
    program = PROGRAM.rpartition("print(")[0] + NOTE
    env = {**os.environ, "TORCH_NCCL_ENABLE_TIMING": timing}
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(build), capture_output=True, text=True, check=True, env=env
    )
    reported = [json.loads(text)["rows"] for text in done.stdout.splitlines()]
    assert reported == ([rows] if rows else [])
