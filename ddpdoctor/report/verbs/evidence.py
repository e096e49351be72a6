"""The content of `analyze`: what was read, what each rank did, and what is lacking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.words import count_of, format_numbers
from ddpdoctor.report.blocks import Content, FactEntry, FactList, items
from ddpdoctor.report.findings import LABEL_WIDTH, count_findings, places_of
from ddpdoctor.report.verbs.job import job_pictures

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Section

MOST_PROBLEMS = 8


def evidence_content(report: Report) -> Content:
    """Return what was read, the ranks by what they did, and what to collect if the cause cannot be told."""
    about = report.data["evidence"]
    about = about if isinstance(about, dict) else {}
    if about.get("job"):
        status = str(about["job"])
    else:
        lines = _number(about, "lines")
        read = count_of(_number(about, "files"), "file") + (f", {count_of(lines, 'line')}" if lines else "")
        runs = _number(about, "runs")
        which = f", the last of {runs} runs" if runs > 1 else ""
        status = f"{read}{which}"
    # The verdict, or why there is none
    if report.verdict is not None:
        headline = report.verdict.summary
    elif any(check.outcome is Outcome.INCONCLUSIVE for check in report.checks):
        headline = "cannot tell the cause from this"
    else:
        headline = "no problem found: the job moves" if about.get("moves") else "no problem found"
    # Why the cause cannot be told, and what to collect, one instruction a line
    lacking: tuple[Section, ...] = ()
    if about.get("unclear"):
        steps = tuple(str(step) for step in about.get("collect") or ())
        facts = (FactEntry(label="unclear", texts=(str(about["unclear"]),)), FactEntry(label="to do", texts=steps))
        lacking = ((FactList(facts=facts, width=LABEL_WIDTH),),)
    notes = [str(note) for note in about.get("notes") or ()]
    return Content(
        headline=headline,
        status=", ".join(filter(None, (status, count_findings(report.findings)))),
        about=(_read_section(about),),
        sections=(
            *places_of(report.ranks, report.verdict),
            *(((items(notes, "  note: "),),) if notes else ()),
            *lacking,
        ),
        ends_with_verdict=True,
        pictures=job_pictures(report),
        others=tuple(one for one in report.findings if one != report.verdict),
    )


def _read_section(about: dict[str, Any]) -> Section:
    """Say what the files were, which ranks were seen, and what could not be read."""
    seen = [rank for rank in about.get("seen_ranks") or () if isinstance(rank, int)]
    world = about.get("world_size")
    of = f" of {world}" if isinstance(world, int) else ""
    ranks = f"{len(seen)}{of}: {format_numbers(seen)}" if seen else "no rank is named"
    problems = [str(one) for one in about.get("not_read") or ()]
    unknown = _number(about, "unknown_files")
    facts = (
        FactEntry(label="read", texts=(", ".join(map(str, about.get("formats") or ())),)),
        FactEntry(label="ranks", texts=(ranks,)),
        FactEntry(label="run", texts=(str(about.get("run")),) if _number(about, "runs") > 1 else ()),
        FactEntry(label="skipped", texts=tuple(problems[:MOST_PROBLEMS])),
        FactEntry(label="unknown", texts=(count_of(unknown, "file"),) if unknown else ()),
    )
    return (FactList(facts=facts, width=LABEL_WIDTH),)


def _number(about: dict[str, Any], name: str) -> int:
    value = about.get(name)
    return value if isinstance(value, int) else 0
