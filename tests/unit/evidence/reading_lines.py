"""Gives the lines of a text to a reader, and returns the facts."""

from ddpdoctor.evidence.lines import parts_of, split_line
from ddpdoctor.evidence.reader import LineReader
from ddpdoctor.model.evidence import Fact, Who

from .feeding import check_funnel


def read_text(reader: LineReader, text: str, who: Who | None = None, source: str = "job.log") -> list[Fact]:
    facts: list[Fact] = []
    for number, raw in enumerate(text.splitlines(), 1):
        for part in parts_of(raw):
            facts += reader.read(split_line(part, number, source, who or Who()))
    facts += reader.end()
    check_funnel(reader, text, facts)
    return facts
