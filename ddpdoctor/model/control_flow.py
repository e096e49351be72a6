"""The branches, loops and jumps of the user's files. Only line numbers are kept, no source text."""

from __future__ import annotations

from dataclasses import dataclass

JUMPS = frozenset({"continue", "break", "return"})
LOOPS = frozenset({"for", "fixed-for", "while"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement that decides which lines run."""

    kind: str
    """"function", "if", "for", "fixed-for" (over a range of constants, so equally often on all ranks), "while", "try",
    "except", "continue", "break" or "return"."""
    line: int
    last_line: int

    def holds(self, line: int) -> bool:
        """Return whether a line is part of the statement."""
        return self.line <= line <= self.last_line


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFlow:
    """The statements of one file, in the order of their lines."""

    file: str
    statements: tuple[Statement, ...]
