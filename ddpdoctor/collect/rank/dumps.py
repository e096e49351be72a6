"""Reads the stacks that faulthandler wrote on a fatal signal or on request."""

from __future__ import annotations

import re

from ddpdoctor.model.stacks import Frame, Stack
from ddpdoctor.recorder.storage import ring_layout

_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-fA-F]+)[^\n]*\(most recent call first\)")
_ALONE = re.compile(r"^Stack \(most recent call first\)")
"""What faulthandler writes above a single requested thread: the main thread, because it runs the handlers."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
FATAL = "Fatal Python error:"
_CURRENT = "Current thread "


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
