"""Reads the answers of processes that were asked for evidence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.files import list_names
from ddpdoctor.collect.recorded import dicts, read_record
from ddpdoctor.collect.run.evidence import DAMAGED
from ddpdoctor.model.codec import INTEGERS
from ddpdoctor.model.facts import GroupState
from ddpdoctor.model.stacks import StackSample
from ddpdoctor.recorder.storage.files import read_plain
from ddpdoctor.recorder.storage.group_json import parse_group_json

if TYPE_CHECKING:
    from pathlib import Path

_MESH = "mesh_"
_MESH_OF_ALL = "mesh_default"
Answers = dict[tuple[int, int], list[tuple[int, str]]]
"""Maps a pid and its start ticks to the answers: the number of the request and the file with the answer."""


def find_answers(folder: Path) -> Answers:
    """Return the answers in the evidence folder, which is listed only once for all ranks."""
    found: Answers = {}
    for name in list_names(folder):
        stem, dot, kind = name.partition(".")
        numbers = stem.split("-")
        if dot and kind == "json" and len(numbers) == 3 and all(number.isdigit() for number in numbers):
            pid, ticks, request = map(int, numbers)
            found.setdefault((pid, ticks), []).append((request, str(folder / name)))
    return found


def read_answer(answers: Answers, pid: int, ticks: int) -> dict[str, Any]:
    """Return the latest readable answer of a process, or an empty dict."""
    for _, path in sorted(answers.get((pid, ticks), ()), reverse=True):
        try:
            body = parse_group_json(read_plain(path))
        except DAMAGED:
            continue
        if isinstance(body, dict):
            return body
    return {}


def read_samples(answer: dict[str, Any]) -> tuple[StackSample, ...]:
    """Return the stack samples of an answer."""
    return tuple(read_record(StackSample, sample, by="sampler") for sample in dicts(answer.get("looks")))


def read_groups(entries: Any) -> tuple[GroupState, ...]:
    """Return the process groups that a rank reported, without damaged entries."""
    return tuple(
        read_record(
            GroupState,
            entry,
            ranks=ranks,
            mesh_dim=_mesh_dim(entry.get("desc")),
            timeout_s=read_seconds(entry.get("timeout_s")),
        )
        for entry in dicts(entries)
        if "name" in entry
        and isinstance(entry.get("enqueued"), int)
        and (ranks := _read_members(entry.get("ranks"))) is not None
    )


def _mesh_dim(desc: Any) -> str:
    """Return the mesh dimension that torch's device mesh wrote into a group's description, or an empty string."""
    known = isinstance(desc, str) and desc.startswith(_MESH) and desc != _MESH_OF_ALL
    return str(desc).removeprefix(_MESH) if known else ""


def read_seconds(value: Any) -> float | None:
    """Return a duration that a recorder wrote, or None if the value is not a positive number."""
    return float(value) if type(value) in {int, float} and 0 < value < math.inf else None


def _read_members(value: Any) -> tuple[int, ...] | None:
    """Return the members of a group, or None if they are damaged. A tuple comes from ``parse_group_json``, checked."""
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return tuple(number for number in value if number in INTEGERS)
    return value if isinstance(value, tuple) else None
