"""Feeds a text to readers of logs, as the pipeline does."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import dedent
from typing import Any, TypeVar

from ddpdoctor.evidence.lines import LogSplitter
from ddpdoctor.evidence.reader import LineReader, condense, condensed_triggers
from ddpdoctor.model.evidence import Fact, Finished, Moving, Who

Kind = TypeVar("Kind", bound="Fact")


def feed(reader: LineReader, text: str, source: str = "job.log") -> list[Fact]:
    """Return the facts of a text; common indentation is taken off."""
    found: list[Fact] = []
    for line in LogSplitter(source).lines(dedent(text).strip("\n"), 1):
        found += reader.read(line)
    found += reader.end()
    check_funnel(reader, text, found)
    return found


def check_funnel(reader: LineReader, text: str, facts: Iterable[Fact]) -> None:
    """Check that a text with facts is read in a large log too. Progress and good ends count at its end only."""
    if any(not isinstance(fact, Moving | Finished) for fact in facts):
        condensed = condense(text.encode())
        assert any(trigger in condensed for trigger in condensed_triggers([reader])), f"no trigger of {reader.name}"


def only(kind: type[Kind], facts: Iterable[Fact]) -> list[Kind]:
    """Return the facts of one kind."""
    return [fact for fact in facts if isinstance(fact, kind)]


def told(value: Any) -> dict[str, Any]:
    """Return what a fact, an operation or a process says beyond the defaults, without place, time and words."""
    names = [name for name in value.__dataclass_fields__ if name not in {"spot", "time", "said"}]
    said = {name: getattr(value, name) for name in names}
    return {name: what for name, what in said.items() if what not in (None, "", (), False)}


# Gives the lines of a text to a reader, and returns the facts.


def read_text(reader: LineReader, text: str, who: Who | None = None, source: str = "job.log") -> list[Fact]:
    facts: list[Fact] = []
    for line in LogSplitter(source, who or Who()).lines(text, 1):
        facts += reader.read(line)
    facts += reader.end()
    check_funnel(reader, text, facts)
    return facts
