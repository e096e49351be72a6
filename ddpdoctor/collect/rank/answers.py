"""Reads what processes wrote when they were asked for evidence, by their recorder or by faulthandler."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.recorded import dicts, read_record
from ddpdoctor.collect.run.evidence import DAMAGED
from ddpdoctor.collect.system import list_names
from ddpdoctor.model.codec import INTEGERS
from ddpdoctor.model.facts import GroupState
from ddpdoctor.model.stacks import Frame, Stack, StackSample
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.files import read_plain
from ddpdoctor.recorder.storage.group_json import parse_group_json

if TYPE_CHECKING:
    from pathlib import Path

_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-fA-F]+)[^\n]*\(most recent call first\)")
_ALONE = re.compile(r"^Stack \(most recent call first\)")
"""What faulthandler writes above a single requested thread: the main thread, because it runs the handlers."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
FATAL = "Fatal Python error:"
_CURRENT = "Current thread "

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


def parse_stacks(text: str, main_ident: int | None, roots: tuple[str, ...]) -> tuple[Stack, ...]:
    """Return the stacks of one dump; ``roots`` are the folders of the rank's standard library."""
    stacks: list[Stack] = []
    frames: list[Frame] | None = None
    thread: str | None = None
    for line in [*text.splitlines(), ""]:
        head = _THREAD.match(line)
        alone = _ALONE.match(line)
        if head or alone or not line.startswith("  "):
            if frames:
                stacks.append(_stack(thread, frames, main_ident))
            frames, thread = ([] if head or alone else None), (head.group(2) if head else None)
        elif frames is not None and (match := _FRAME.match(line)):
            frames.append(_frame(match, roots))
    return tuple(stacks)


def split_fatal(text: str) -> tuple[str, str]:
    """Return what was dumped on request, and the part from the fatal error on (empty if there was none)."""
    before, mark, after = text.partition(FATAL)
    return before, mark + after if mark else ""


def struck_thread(fatal: str) -> str:
    """Return the part of a fatal dump about the thread that the signal hit, empty if that thread runs no Python."""
    _, mark, after = fatal.partition(_CURRENT)
    return mark + after.partition("\n\n")[0] if mark else ""


def _stack(thread: str | None, frames: list[Frame], main_ident: int | None) -> Stack:
    is_main = thread is None or (main_ident is not None and int(thread, 16) == main_ident)
    name = "MainThread" if thread is None or is_main else f"thread 0x{thread.lstrip('0')}"
    return Stack(thread=name, is_main=is_main, is_daemon=False, frames=tuple(reversed(frames)))


def _frame(match: re.Match[str], roots: tuple[str, ...]) -> Frame:
    file, line, function = match.groups()
    user = (
        not ring_layout.is_library_path(file, roots) and not file.startswith("<") and "/ddpdoctor/recorder/" not in file
    )
    return Frame(file=file, line=int(line) if line.isdigit() else 0, function=function, user=user)
