"""Gives the lines of a text to a reader, and returns the facts."""

from ddpdoctor.evidence.lines import LogSplitter
from ddpdoctor.evidence.reader import LineReader
from ddpdoctor.model.evidence import Fact, Who
from tests.unit.evidence.feeding import check_funnel


def read_text(reader: LineReader, text: str, who: Who | None = None, source: str = "job.log") -> list[Fact]:
    facts: list[Fact] = []
    for line in LogSplitter(source, who or Who()).lines(text, 1):
        facts += reader.read(line)
    facts += reader.end()
    check_funnel(reader, text, facts)
    return facts
