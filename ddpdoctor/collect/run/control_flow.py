"""Reads where the user's files branch, loop and jump, and saves it with the run, because the files may change later."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.run.evidence import save
from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import ControlFlow, Statement
from ddpdoctor.recorder.storage.files import read_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.facts import Job

FILE = "control_flow.json"
MAX_FILES = 64
MAX_SOURCE_BYTES = 2 * 2**20
_KINDS: dict[type[ast.AST], str] = {
    ast.FunctionDef: "function",
    ast.AsyncFunctionDef: "function",
    ast.If: "if",
    ast.For: "for",
    ast.AsyncFor: "for",
    ast.While: "while",
    ast.Try: "try",
    ast.ExceptHandler: "except",
    ast.Continue: "continue",
    ast.Break: "break",
    ast.Return: "return",
}


def save_control_flow(folder: Path, job: Job) -> bool:
    """Save the control flow of the files that made the job's calls; return whether there was any to save."""
    with contextlib.suppress(OSError):
        began_s = (folder / "run.json").stat().st_mtime
        flows = tuple(flow for file in _files_of(job) if (flow := read_control_flow(Path(file), began_s)) is not None)
        if flows:
            save(folder / FILE, flows)
            return True
    return False


def read_control_flow(path: Path, unchanged_since_s: float) -> ControlFlow | None:
    """Return the statements that decide which lines run, or None if the file changed since the run or is no Python."""
    try:
        file = path.resolve(strict=True)
        if file.stat().st_mtime > unchanged_since_s:
            return None
        tree = ast.parse(read_plain(file, MAX_SOURCE_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return ControlFlow(file=str(path), statements=tuple(sorted(_statements(tree), key=lambda one: one.line)))


def _files_of(job: Job) -> list[str]:
    """Return the user's files in which the ranks made calls, and from which they were called."""
    sites = [kind.site for rank in job.ranks for kind in pack_calls(rank.recent_calls).kinds]
    sites += [call.site for rank in job.ranks for call in rank.open_calls]
    sites += [
        frame
        for rank in job.ranks
        for sample in rank.samples[-1:]
        for stack in sample.stacks
        if stack.is_main
        for frame in stack.frames
        if frame.user
    ]
    sites += [frame for rank in job.ranks for error in rank.raised for frame in error.frames if frame.user]
    return list(dict.fromkeys(site.file for site in sites if site is not None))[:MAX_FILES]


def _statements(tree: ast.AST) -> Iterator[Statement]:
    for node in ast.walk(tree):
        kind = _KINDS.get(type(node))
        if kind is not None:
            place: Any = node
            fixed = isinstance(node, ast.For) and _is_fixed(node.iter)
            yield Statement(
                kind="fixed-for" if fixed else kind,
                line=place.lineno,
                last_line=place.end_lineno or place.lineno,
                body_last_line=node.body[-1].end_lineno if isinstance(node, ast.If) else None,
            )


def _is_fixed(iterated: ast.expr) -> bool:
    """Return whether a loop runs equally often on all ranks because it is over a range of constants."""
    named = isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "range"
    return named and isinstance(iterated, ast.Call) and all(isinstance(one, ast.Constant) for one in iterated.args)
