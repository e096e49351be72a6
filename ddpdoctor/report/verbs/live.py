"""The reports of `status` and `history`: jobs that run, and jobs that ran."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.facts import Presence
from ddpdoctor.model.live import HISTORY_FORMAT, HISTORY_VERSION, Liveness
from ddpdoctor.model.words import (
    count_of,
    format_digits,
    format_memory,
    format_numbers,
    format_span,
    name_list,
    rank_list,
)
from ddpdoctor.report.blocks import FactEntry, FactList, Heading, Text, Tone, items, table_of
from ddpdoctor.report.lines import format_hosts, format_place, format_ranks
from ddpdoctor.report.text import TextPage, add_sections, draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ddpdoctor.model.live import History, JobNow, RankNow, Start
    from ddpdoctor.report.blocks import Block, Table

NOT_KNOWN = "?"
LEGEND = "lost: steps made again at most, and time from the last step to the next start's first; ?: not known"
MOST_WORDS = 8  # most words of a command line in a heading
STEPS_APART = 2  # our choice: ranks are read one after another, so those of one job may be this many steps apart
PACE_APART = 0.1
WAITS_APART = 0.1
MOST_STILL = 8  # most lines that say where ranks are which do not train
_PRESENCE = {
    Presence.LEFT: "its `wrap` has ended",
    Presence.SILENT: "nothing is heard of its `wrap` any more",
    Presence.ABSENT: "its `wrap` has not come yet",
}


def render_history(
    jobs: Sequence[History], unread: Sequence[str], *, width: int | None, color: bool, cwd: Path | None = None
) -> str:
    """Draw histories as text. ``width`` is None if the output is not a terminal. Then nothing is wrapped."""
    page = TextPage(width=width, cwd=cwd)
    for job in jobs:
        rows, reasons = [], []
        for number, (start, cost) in enumerate(zip(job.starts, job.costs, strict=True), start=1):
            if start.code:
                reasons.append(f"{number}: {_verdict_words(start)}: {start.summary}")
            end = start.ended_at or start.last_progress_at
            span_s = None if start.began_at is None or end is None else (end - start.began_at).total_seconds()
            unknown = NOT_KNOWN if cost.seconds is not None or start.failed else ""
            began = NOT_KNOWN if start.began_at is None else f"{start.began_at:%m-%d %H:%M:%S}"
            ran = NOT_KNOWN if span_s is None else format_span(max(0.0, span_s))
            lost = unknown if cost.steps is None else str(cost.steps)
            lost_time = "" if cost.seconds is None else format_span(cost.seconds)
            rows.append((str(number), began, ran, str(start.steps), _verdict_words(start), lost, lost_time))
        table = table_of(
            ("#", ("started", "UTC"), "ran", "step", "ended", ("lost", "steps"), ("lost", "time")),
            rows,
            left={"started", "ended"},
            weights={"started": 3, "ran": 4, "lost": 2},
            tones={at: Tone.ERROR for at, start in enumerate(job.starts) if start.failed},
            legend=(LEGEND,) if len(rows) > 1 else (),
        )
        heading = (Heading(" ".join(job.command[:MOST_WORDS])),) if len(jobs) > 1 else ()
        head = (*heading, Text(f"ddpdoctor: {sentence(job)}", tone=Tone.STRONG))
        add_sections(page, [head, (table,), (items(reasons, "  "),)])
    add_sections(page, [tuple(Text(f"not read: {why}", tone=Tone.WARNING) for why in unread)])
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
                "starts": [
                    {
                        **{
                            name: value and value.isoformat() if name.endswith("_at") else value
                            for name, value in asdict(start).items()
                            if name not in {"passes", "first_epoch", "hosts"}
                        },
                        "status": start.status.value,
                        "lost_steps": cost.steps,
                        "lost_s": cost.seconds,
                    }
                    for start, cost in zip(job.starts, job.costs, strict=True)
                ],
            }
            for job in jobs
        ],
        "unread": list(unread),
    }


def sentence(job: History) -> str:
    """Say how often a job started and failed, who was to blame, and how far apart the failures are."""
    span = f" in {format_span(job.span_s)}" if job.span_s is not None else ""
    parts = [f"{count_of(len(job.starts), 'start')}{span}, {count_of(job.failures, 'failure')}"]
    if job.returning:
        most = job.returning[0].times
        most_blamed = [row.who for row in job.returning if row.times == most]
        ranks = ["" if who.rank is None else f"rank {who.rank}" for who in most_blamed]
        pairs = zip(ranks, most_blamed, strict=True)
        names = [" on ".join(filter(None, (rank, who.host))) for rank, who in pairs]
        parts.append(f"{name_list(names)} {'was' if len(names) == 1 else 'were'} to blame in {most} of them")
    if job.between_failures_s is not None and job.failures > 1:
        parts.append(f"mean time between failures {format_span(job.between_failures_s)}")
    return "; ".join(parts)


def _verdict_words(start: Start) -> str:
    if not start.code:
        return start.status.value
    ranks = {one.rank for one in start.blamed if one.rank is not None}
    hosts = dict.fromkeys(one.host for one in start.blamed if one.host and start.hosts > 1)
    whom = " on ".join(part for part in (format_ranks(ranks), format_hosts(hosts)) if part)
    return ", ".join(part for part in (f"{start.code} {start.kind}", whom) if part)


def render_status(status: JobNow, *, width: int | None, color: bool, cwd: Path | None = None) -> str:
    """Draw a status as text. ``width`` is None if the output is not a terminal. Then nothing is wrapped."""
    page = TextPage(width=width, cwd=cwd)
    # The command that shows the report stands on a line of its own, so that it can be pasted.
    command = FactList((FactEntry("report", (f"ddpdoctor report {status.run}",), whole=True),))
    if status.state is Liveness.ENDED:
        code = status.exit_status
        how = ", and its `wrap` left no word of how" if code is None else f" with exit status {code}"
        add_sections(page, [(Heading(f"ddpdoctor: the job has ended{how}"), command)])
        return draw(page, color=color)
    classes = fold(status.ranks)
    reported: list[Block] = []
    if status.reported:
        reported = [Text(f"`wrap` has reported {status.reported}", tone=Tone.ERROR), command]
    table = (_table(classes),) if classes else ()
    is_here = status.state is Liveness.RUNNING
    known = ["the job runs" if is_here else f"the job was started on {status.host}"]
    if status.running_s is not None:
        known[0] += f" for {format_span(status.running_s)}" if is_here else f" {format_span(status.running_s)} ago"
    if status.world_size is not None:
        known.append(count_of(status.world_size, "rank"))
    if status.attempt:
        known.append(f"after {count_of(status.attempt, 'restart')}")
    if not status.ranks:
        known.append("no rank has started yet")
    heading = Heading(f"ddpdoctor: {', '.join(known)}; run folder {status.run}")
    unseen = []
    for node in status.unseen:
        name = f"node {node.number}" + (f" ({node.host})" if node.host else "")
        whose = f"{rank_list(node.ranks)} on {name}" if node.ranks else f"the ranks on {name}"
        said = [] if node.alive is None else [count_of(node.alive, "living rank")]
        said += [] if node.waits_s is None else [f"one has waited for {format_span(node.waits_s)}"]
        words = f"; its `wrap` says: {', '.join(said)}" if said else ""
        why = _PRESENCE.get(node.presence, f"run `ddpdoctor status` there{words}")
        unseen.append(f"{whose} cannot be seen from here: {why}")
    seen = {rank.rank for rank in status.ranks}
    missing = set(range(status.world_size or 0)) - seen if status.ranks and not unseen else set()
    if missing:
        there = "`ddpdoctor status` on the first node says what is known of all nodes"
        unseen.append(f"{rank_list(missing)} cannot be seen from here: {there}")
    texts = (Text(line) for line in unseen)
    add_sections(page, [(heading, *table), (*reported, *_doings(status, classes), *texts)])
    return draw(page, color=color)


def fold(ranks: Iterable[RankNow]) -> list[list[RankNow]]:
    """Return classes of ranks that do the same, each class sorted by rank."""

    def are_alike(first: RankNow, other: RankNow) -> bool:
        if (first.lives, first.state) != (other.lives, other.state):
            return False
        if not first.trains:
            lines = [(where.file, where.line) if where is not None else None for where in (first.where, other.where)]
            return first.step == other.step and lines[0] == lines[1]
        paces, waits = ([getattr(rank, name) or 0.0 for rank in (first, other)] for name in ("step_ms", "waits_share"))
        is_same_pace = abs(paces[0] - paces[1]) <= PACE_APART * max(paces)
        return abs(first.step - other.step) <= STEPS_APART and is_same_pace and abs(waits[0] - waits[1]) <= WAITS_APART

    classes: list[list[RankNow]] = []
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        own = next((those for those in classes if are_alike(those[0], rank)), None)
        if own is None:
            classes.append([rank])
        else:
            own.append(rank)
    return classes


def _table(classes: Sequence[Sequence[RankNow]]) -> Table:
    several = len({rank.host for those in classes for rank in those}) > 1
    rows = []
    for those in classes:
        since_s = max((rank.since_s for rank in those if rank.since_s is not None), default=None)
        rows.append(
            (
                format_numbers(rank.rank for rank in those),
                *([format_hosts(rank.host for rank in those)] if several else []),
                _range(rank.step for rank in those),
                _known(those, "step_ms", lambda ms: format_digits(median(ms))),
                _known(those, "waits_share", lambda shares: f"{median(shares):.0%}"),
                _range(rank.epoch for rank in those),
                _range(rank.batch for rank in those),
                _known(those, "memory_bytes", lambda sizes: format_memory(max(sizes))),
                those[0].state + (f" for {format_span(since_s)}" if since_s is not None else ""),
            )
        )
    hosts = ["host"] if several else []
    return table_of(
        ("ranks", *hosts, "step", ("step time", "ms"), "waits", "epoch", "batch", "memory", "does"),
        rows,
        left={"ranks", "host", "does"},
        weights={"host": 4, "step time": 6, "waits": 5, "epoch": 1, "batch": 2, "memory": 3},
        tones={at: Tone.STRONG for at, those in enumerate(classes) if not those[0].trains},
    )


def _range(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _known(those: Sequence[RankNow], name: str, write: Callable[[list[Any]], str]) -> str:
    known = [value for rank in those if (value := getattr(rank, name)) is not None]
    return write(known) if known else "-"


def _doings(status: JobNow, classes: Sequence[Sequence[RankNow]]) -> Iterator[Text]:
    """Say who waits, where the living ranks are that do not train, and whether replicas are equal."""
    for wait in status.waits:
        others = sorted(set(status.waited_for) - set(wait.ranks))
        whom = f" for {rank_list(others)}" if others else ""
        verb = "has" if len(wait.ranks) == 1 else "have"
        words = f"{rank_list(wait.ranks)} {verb} waited{whom} for {format_span(wait.since_s)}, in {wait.call}"
        yield Text(words, tone=Tone.WARNING)
    still = [(those, those[0].where) for those in classes if those[0].lives and not those[0].trains]
    for those, where in [(those, where) for those, where in still if where is not None][:MOST_STILL]:
        verb = "is" if len(those) == 1 else "are"
        yield Text(f"{rank_list(rank.rank for rank in those)} {verb} at {format_place(where)}")
    if (found := status.replicas) is None:
        return
    if not found.differing:
        yield Text(f"replicas equal up to {found.at} {found.equal_up_to}, in {count_of(found.compared, 'check')}")
        return
    since = "never equal" if found.equal_up_to is None else f"equal up to {found.at} {found.equal_up_to} only"
    yield Text(f"replicas {since}: {' and '.join(found.differing)} differ", tone=Tone.WARNING)
