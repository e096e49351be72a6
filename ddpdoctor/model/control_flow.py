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
    body_last_line: int | None = None
    """The last line of an "if" without its else branch."""

    def holds(self, line: int) -> bool:
        """Return whether a line is part of the statement."""
        return self.line <= line <= self.last_line

    def holds_both(self, one: int, other: int) -> bool:
        """Return whether two lines are in the same branch of the statement: a rank at one has not gone around it."""
        end = self.last_line if self.body_last_line is None else self.body_last_line
        return self.holds(one) and self.holds(other) and (one <= end) == (other <= end)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFlow:
    """The statements of one file, in the order of their lines."""

    file: str
    statements: tuple[Statement, ...]
