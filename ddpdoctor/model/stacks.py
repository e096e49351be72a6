"""Python stacks of a process, and the lines in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str
    user: bool  # True for the user's own code, that is, not the standard library, an installed package or ddpdoctor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The frames of one thread, outermost first."""

    thread: str
    is_main: bool
    is_daemon: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSample:
    """All stacks of a process at one time. ``by`` is "sampler", or "signal" if it answered only a signal."""

    time_ns: int
    by: str
    stacks: tuple[Stack, ...]
