"""Writes dumps of torch's flight recorder as its versions do, of jobs whose collectives a test lists.

The layouts are those of FlightRecorderDetail.hpp in torch 2.4 (2.1), 2.6 (2.4), 2.8 (2.9) and 2.13 (2.10), of the JSON
of its handlers, and of TorchComms.
"""

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

S = 1_000_000_000
START_NS = 1_790_000_000 * S
TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
SCRIPT = "/home/me/train.py"
VERSIONS = ("2.1", "2.4", "2.9", "2.10")
LACKS = {
    "2.1": ("pg_status", "comm_lib_version", "timeout_ms", "thread_id", "thread_name"),
    "2.4": ("comm_lib_version", "thread_id", "thread_name"),
    "2.9": (),
    "2.10": (),
}
"""What a dump of a version lacks, compared with the newest."""


@dataclass
class Recorder:
    """The flight recorder of one rank, to which a test adds calls."""

    rank: int
    world: int
    backend: str = "nccl"
    groups: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """Description and members by name."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    transfers: dict[str, int] = field(default_factory=dict)
    now_ns: int = START_NS

    def __post_init__(self) -> None:
        self.groups.setdefault("0", ("default_pg", list(range(self.world))))

    def call(
        self, op: str = "all_reduce", size: tuple[int, ...] = (1024,), *, group: str = "0", state: str = "completed",
        line: int = 40, dtype: str = "Float", out: tuple[int, ...] | None = None, retired: bool | None = None,
        same_number: bool = False,
    ) -> "Recorder":  # fmt: skip
        """Add a collective."""
        self.numbers[group] = self.numbers.get(group, 0) + (0 if same_number else 1)
        sizes = [list(size)] if op != "barrier" else []
        return self._add(
            f"{self.backend}:{op}", group, state, line, is_p2p=False,
            retired=state == "completed" if retired is None else retired,
            collective_seq_id=self.numbers[group], p2p_seq_id=0, input_sizes=sizes, input_dtypes=[dtype] * len(sizes),
            output_sizes=[list(out)] if out is not None else sizes, output_dtypes=[dtype] * len(sizes),
        )  # fmt: skip

    def transfer(
        self, op: str, peer: int, size: int = 256, *, group: str = "0", state: str = "completed", line: int = 60
    ) -> "Recorder":
        """Add a send or receive. ``peer`` is a rank of the group."""
        self.transfers[group] = self.transfers.get(group, 0) + 1
        own = self.groups[group][1].index(self.rank)
        arrow = "->" if op == "send" else "<-"
        name = f"{self.backend}:{op} {own}{arrow}{peer}"
        return self._add(
            name, group, state, line, is_p2p=True, retired=state == "completed",
            collective_seq_id=self.numbers.get(group, 0), p2p_seq_id=self.transfers[group],
            input_sizes=[[size]], input_dtypes=["Float"],
            output_sizes=[[size]], output_dtypes=["Float"],
        )  # fmt: skip

    def _add(self, name: str, group: str, state: str, line: int, **more: Any) -> "Recorder":
        self.now_ns += 1_000_000
        self.entries.append({
            "frames": [
                {"name": name.partition(":")[2], "filename": f"{TORCH}/distributed/distributed_c10d.py", "line": 3000},
                {"name": "wrapper", "filename": f"{TORCH}/distributed/c10d_logger.py", "line": 83},
                {"name": "step", "filename": SCRIPT, "line": line},
                {"name": "<module>", "filename": SCRIPT, "line": 99},
            ],
            "record_id": len(self.entries), "pg_id": list(self.groups).index(group),
            "process_group": (group, self.groups[group][0]), "op_id": len(self.entries) + 1, "profiling_name": name,
            "state": state, "time_created_ns": self.now_ns,
            "time_discovered_started_ns": None if state == "scheduled" else self.now_ns + 1000,
            "time_discovered_completed_ns": self.now_ns + 2000 if state == "completed" else None,
            "timeout_ms": 600_000, "thread_id": "140", "thread_name": "python", **more,
        })  # fmt: skip
        return self

    def body(self, version: str = "2.10", *, ring: int = 2000) -> dict[str, Any]:
        """Return the content of the dump; a ring holds the last entries."""
        status = {
            str(at): {
                "last_enqueued_collective": self.numbers.get(name, -1), "last_started_collective": -1,
                "last_completed_collective": -1,
            }
            for at, name in enumerate(self.groups)
        }  # fmt: skip
        body = {
            "version": version,
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": str(members)}
                for name, (desc, members) in self.groups.items() if self.rank in members
            },
            "comm_lib_version" if version == "2.10" else "nccl_version": "2.27.5",
            "pg_status": status,
            "entries": self.entries[-ring:],
        }  # fmt: skip
        lacking = LACKS[version]
        kept = {key: value for key, value in body.items() if key not in lacking}
        kept["entries"] = [
            {key: value for key, value in entry.items() if key not in lacking} for entry in body["entries"]
        ]
        return kept

    def json(self) -> dict[str, Any]:
        """Return the content as torch's handlers serve it: no frames, zeros for absent times, numbers as text."""
        body = self.body()
        body["entries"] = [
            {
                **{key: value for key, value in entry.items() if key != "frames"},
                "process_group": list(entry["process_group"]),
                "time_discovered_started_ns": entry["time_discovered_started_ns"] or 0,
                "time_discovered_completed_ns": entry["time_discovered_completed_ns"] or 0,
            }
            for entry in body["entries"]
        ]
        body["pg_status"] = {
            at: {key: str(value) for key, value in one.items()} for at, one in body["pg_status"].items()
        }
        if not body["entries"]:
            del body["entries"]
        return body

    def gloo(self) -> dict[str, Any]:
        """Return the content as Gloo's recorder has it: no members, states never change, no sends or receives."""
        body = self.body()
        body["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
        body["entries"] = [
            {
                **entry, "process_group": ("", ""), "state": "scheduled", "retired": entry["state"] == "completed",
                "profiling_name": entry["profiling_name"].replace("nccl:", "gloo:"),
            }
            for entry in body["entries"] if not entry["is_p2p"]
        ]  # fmt: skip
        return body

    def torchcomms(self) -> dict[str, Any]:
        """Return the content as TorchComms writes it: one counter for all groups, no peers, no blanks in ranks."""
        body = self.body()
        body["pg_config"] = {
            name: {**one, "desc": "ncclx", "ranks": one["ranks"].replace(" ", "")}
            for name, one in body["pg_config"].items()
        }
        body["pg_status"] = {}
        body["entries"] = [
            {
                **entry, "is_p2p": False, "p2p_seq_id": 0, "collective_seq_id": at,
                "profiling_name": entry["profiling_name"].replace("nccl:", "ncclx:").split(" ")[0],
                "process_group": (entry["process_group"][0], "ncclx"),
            }
            for at, entry in enumerate(body["entries"])
        ]  # fmt: skip
        return body


def recorders(world: int, groups: dict[str, list[int]] | None = None) -> list[Recorder]:
    """Return the recorders of all ranks; ``groups`` are the members of further groups by name."""
    found = [Recorder(rank, world) for rank in range(world)]
    for one in found:
        one.groups |= {name: (name.rpartition("/")[2], members) for name, members in (groups or {}).items()}
    return found


def write(folder: Path, rank: int, body: dict[str, Any], name: str = "nccl_trace_rank_") -> Path:
    """Write a dump as a pickle of protocol 2, as torch does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{rank}"
    path.write_bytes(pickle.dumps(body, protocol=2))
    return path


def write_json(folder: Path, rank: int, body: dict[str, Any]) -> Path:
    """Write a dump as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fr_trace_rank_{rank}.json"
    path.write_text(json.dumps(body))
    return path
