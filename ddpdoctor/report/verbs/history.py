"""Draws how jobs that restart fared: one sentence, a table of their starts, and why each ended."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.amounts import format_span
from ddpdoctor.model.history import HISTORY_FORMAT, HISTORY_VERSION
from ddpdoctor.model.rank_words import count_of, name_list
from ddpdoctor.report.blocks import Column, Heading, Item, Items, Table, Text, Tone
from ddpdoctor.report.names import format_hosts, format_ranks
from ddpdoctor.report.text.blocks import add_sections
from ddpdoctor.report.text.page import TextPage, draw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from pathlib import Path

    from ddpdoctor.model.history import Blamed, Cost, History, Returning, Start
    from ddpdoctor.report.blocks import Section

NOT_KNOWN = "?"
LEGEND = "lost: steps made again at most, and time from the last step to the next start's first; ?: not known"
MOST_WORDS = 8
"""Most words of a command line in a heading."""


def render_history(
    jobs: Sequence[History], unread: Sequence[str], *, width: int | None, color: bool, cwd: Path | None = None
) -> str:
    """Draw histories as text. ``width`` is None if the output is not a terminal. Then nothing is wrapped."""
    page = TextPage(width=width, cwd=cwd)
    for job in jobs:
        add_sections(page, history_sections(job, several=len(jobs) > 1))
    add_sections(page, [tuple(Text(text=f"not read: {why}", tone=Tone.WARNING) for why in unread)])
    return draw(page, color=color)


def plain_histories(jobs: Sequence[History], unread: Sequence[str]) -> dict[str, Any]:
    """Return histories as the object that ``--format json`` writes."""
    return {
        "format": HISTORY_FORMAT,
        "version": HISTORY_VERSION,
        "jobs": [
            {
                "sentence": sentence(job),
                "command": list(job.command),
                "failures": job.failures,
                "span_s": job.span_s,
                "between_failures_s": job.between_failures_s,
                "returning": [{**asdict(row.who), "times": row.times} for row in job.returning],
                "starts": [_plain_start(start, cost) for start, cost in zip(job.starts, job.costs, strict=True)],
            }
            for job in jobs
        ],
        "unread": list(unread),
    }


def _plain_start(start: Start, cost: Cost) -> dict[str, Any]:
    plain = {name: value for name, value in asdict(start).items() if name not in {"passes", "first_epoch", "hosts"}}
    times = {name: value and value.isoformat() for name, value in plain.items() if name.endswith("_at")}
    return {**plain, **times, "status": start.status.value, "lost_steps": cost.steps, "lost_s": cost.seconds}


def history_sections(job: History, *, several: bool) -> tuple[Section, ...]:
    """Return the blocks of one job. ``several`` jobs are told apart by their command lines."""
    heading = (Heading(text=" ".join(job.command[:MOST_WORDS])),) if several else ()
    reasons = [
        Item(text=f"{number}: {_verdict_words(start)}: {start.summary}")
        for number, start in enumerate(job.starts, start=1)
        if start.code
    ]
    return (
        (*heading, Text(text=f"ddpdoctor: {sentence(job)}", tone=Tone.STRONG)),
        (_table(job),),
        (Items(items=tuple(reasons), mark="  "),) if reasons else (),
    )


def sentence(job: History) -> str:
    """Say how often a job started and failed, who was to blame, and how far apart the failures are."""
    span = f" in {format_span(job.span_s)}" if job.span_s is not None else ""
    parts = [f"{count_of(len(job.starts), 'start')}{span}, {count_of(job.failures, 'failure')}"]
    parts += _returning_words(job.returning)
    if job.between_failures_s is not None and job.failures > 1:
        parts.append(f"mean time between failures {format_span(job.between_failures_s)}")
    return "; ".join(parts)


def _returning_words(returning: Sequence[Returning]) -> list[str]:
    if not returning:
        return []
    most = returning[0].times
    names = [_who(row.who) for row in returning if row.times == most]
    verb = "was" if len(names) == 1 else "were"
    return [f"{name_list(names)} {verb} to blame in {most} of them"]


def _who(blamed: Blamed) -> str:
    rank = "" if blamed.rank is None else f"rank {blamed.rank}"
    return f"{rank} on {blamed.host}" if rank and blamed.host else rank or blamed.host


def _table(job: History) -> Table:
    rows = list(zip(job.starts, job.costs, strict=True))

    def column(name: str, cells: Sequence[str], weight: int | None = None, unit: str = "") -> Column:
        align = "left" if name in {"ended", "started"} else "right"
        return Column(name=name, unit=unit, cells=tuple(cells), weight=weight, align=align)  # type: ignore[arg-type]

    return Table(
        columns=(
            column("#", [str(number) for number in range(1, len(rows) + 1)]),
            column("started", [_time_words(start.began_at) for start, _ in rows], 3, "UTC"),
            column("ran", [_ran_words(start) for start, _ in rows], 4),
            column("step", [str(start.steps) for start, _ in rows]),
            column("ended", [_verdict_words(start) for start, _ in rows]),
            column("lost", [_steps_words(cost, start) for start, cost in rows], 2, "steps"),
            column("lost", [_seconds_words(cost) for _, cost in rows], 2, "time"),
        ),
        tones={at: Tone.ERROR for at, (start, _) in enumerate(rows) if start.failed},
        indent=2,
        legend=(LEGEND,) if len(rows) > 1 else (),
    )


def _time_words(time: datetime | None) -> str:
    return f"{time:%m-%d %H:%M:%S}" if time is not None else NOT_KNOWN


def _ran_words(start: Start) -> str:
    end = start.ended_at or start.last_progress_at
    if start.began_at is None or end is None:
        return NOT_KNOWN
    return format_span(max(0.0, (end - start.began_at).total_seconds()))


def _verdict_words(start: Start) -> str:
    """Return how a start ended: its verdict and whom that blames, or in a word."""
    if not start.code:
        return start.status.value
    ranks = {one.rank for one in start.blamed if one.rank is not None}
    hosts = dict.fromkeys(one.host for one in start.blamed if one.host and start.hosts > 1)
    whom = " on ".join(part for part in (format_ranks(ranks), format_hosts(hosts)) if part)
    return ", ".join(part for part in (f"{start.code} {start.kind}", whom) if part)


def _steps_words(cost: Cost, start: Start) -> str:
    if cost.steps is None:
        return NOT_KNOWN if cost.seconds is not None or start.failed else ""
    return str(cost.steps)


def _seconds_words(cost: Cost) -> str:
    return format_span(cost.seconds) if cost.seconds is not None else ""
