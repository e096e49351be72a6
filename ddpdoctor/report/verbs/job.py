"""The reports of `wrap` and `analyze`: how the job ended, where its ranks are, replicas, and its pictures."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from string import ascii_uppercase
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import BEST_CLOCKS, Consistency, StreamClock, What
from ddpdoctor.model.data import LoaderTaken
from ddpdoctor.model.errors import ExitStatus
from ddpdoctor.model.findings import Attempt, JobStatus, Outcome, Severity, as_earlier
from ddpdoctor.model.pictures import RankWaits, SourceExcerpt, Timeline
from ddpdoctor.model.words import count_of, format_numbers, grouped, majority_of, rank_list
from ddpdoctor.report import blocks as bl
from ddpdoctor.report.findings import LABEL_WIDTH, TONES, count_findings, places_of, read_part, read_picture
from ddpdoctor.report.lines import format_ranks, merge_places, title_of
from ddpdoctor.report.verbs.speed import STRAGGLER, speed_bars, speed_data, speed_headline, speed_sections

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.model.consistency import Difference, Stream, TensorSplit
    from ddpdoctor.model.findings import Finding, RankRow, Report

REPLICAS = "DD50"  # the codes of findings about replicas begin with it
NOUN = {What.PARAMETER: "parameters", What.GRADIENT: "gradients", What.BUFFER: "buffers", What.STATE: "optimizer state"}
SAME_LETTER = "Equal letters: equal contents. Most have A."
EQUAL, OTHER = "equal", "other"
DATA = "DD70"  # the codes of findings about data begin with it
SAME_ORDER = "Equal letters of a loader: the same indices in the same order. The number: batches."
NAMED = f"{bl.MARK}a rank that a finding about data names"
MOST_FRAMES = 60  # our choice: the innermost frames of a longer stack, as of a recursion
MOST_NODES = 400  # Our choice: more nodes cannot be read. Ranks in other frames are then missing below a node.
_LIBRARY = re.compile(r"/(site-packages|dist-packages)/|/lib(64)?/python\d|^<frozen")
_PACKAGE = re.compile(r"^.*/(?:site-packages|dist-packages|python\d[\d.]*)/")
_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)", re.DOTALL)
# Our choice: a distance from here on is said, because a difference may then have begun that many steps earlier.
SPARSE_STEPS = 256
NOTABLE_S = 10.0  # our choice: shorter waits for a core are usual where several programs share a machine
MOST_PROBLEMS = 8


def consistency_pictures(consistency: Consistency | None, findings: Iterable[Finding]) -> Iterator[bl.Grid]:
    """Yield a grid of tensors by ranks for each stream of records in which tensors differ."""
    streams = () if consistency is None else consistency.streams
    tone = tone_of(findings)
    several = len({(stream.group, stream.model) for stream in streams}) > 1
    for stream in streams:
        splits = [(each, split) for each in stream.differences for split in each.splits][: bl.MAX_ROWS]
        if not splits:
            continue
        rows = [_row(stream, each, split, tone) for each, split in splits]
        ranks = sorted({*stream.ranks, *(rank for _, cells in rows for rank in cells)})
        hidden = sum(each.differing for each in stream.differences) - len(splits)
        # One row for each kind of tensors, for those that are equal on all ranks
        equal = dict.fromkeys(ranks, bl.GridCell(EQUAL, tone=bl.Tone.GOOD))
        differences = {each.what: each for each in stream.differences}
        for what in stream.kinds:
            if (difference := differences.get(what)) is None:
                rows.append((f"all {NOUN[what]}", equal))
            elif others := difference.of - difference.differing:
                rows.append((f"{count_of(others, 'other')} ({NOUN[what]})", equal))
        points = "at the end" if stream.clock is StreamClock.END else f"at each {stream.clock.value}"
        model = f", model {stream.model}" if several and stream.model > 0 else ""
        outside = ", parameters outside DDP" if stream.model < 0 else ""
        title = f"replicas that differ, compared {points}{model}{outside}"
        legend = (SAME_LETTER, *bl.not_shown(hidden, "differing tensor"))
        yield bl.grid_by_member(title, rows, ranks, format_ranks, axes=("tensor", "rank"), legend=legend)


def tone_of(findings: Iterable[Finding]) -> bl.Tone:
    """Return the tone of a tensor that differs: that of the worst finding about replicas, or a note without one."""
    severities = [finding.severity for finding in findings if finding.code.startswith(REPLICAS)]
    return TONES[min(severities, key=lambda severity: severity.order, default=Severity.INFO)]


def letter(side: int) -> str:
    """Return the letter of a set of equal contents: A for the largest set. Beyond Z, a word stands for all others."""
    return ascii_uppercase[side] if side < len(ascii_uppercase) else OTHER


def _row(stream: Stream, difference: Difference, split: TensorSplit, tone: bl.Tone) -> bl.Row:
    one = split.row
    name = " ".join(part for part in (one.name, one.part) if part)
    if stream.clock is StreamClock.END:
        when = "at the end"
    else:
        when = f"from {'step' if stream.clock is StreamClock.STEP else 'backward'} {difference.number} on"
    most, absent = majority_of(split.sides), frozenset(split.absent_on)
    others = [rank for side in split.sides[len(ascii_uppercase) :] for rank in side]
    cells = dict.fromkeys(others, bl.GridCell(OTHER, tone=tone, about="unlike those with a letter"))
    for number, side in enumerate(split.sides[: len(ascii_uppercase)]):
        lacks = bool(absent) and absent.issuperset(side)
        cell = bl.GridCell(
            "none" if lacks else letter(number),
            tone=bl.Tone.PLAIN if side is most else tone,
            about=f"{'not there' if lacks else 'equal'} on {format_ranks(side)}",
        )
        cells.update(dict.fromkeys(side, cell))
    return f"{name} ({one.what.value}), {when}", cells


def loader_pictures(report: Report) -> Iterator[bl.Grid]:
    """Yield the grid of passes by ranks. Nothing if no finding names a loader, or the report lacks them."""
    findings = [finding for finding in report.findings if finding.code.startswith(DATA)]
    lines = {(place.file, place.line) for finding in findings for place in finding.where}
    taken = read_picture(tuple[LoaderTaken, ...], report.data.get("loaders")) or ()
    loaders = [loader for loader in taken if (loader.file, loader.line) in lines]
    rows: list[bl.Row] = []
    for loader in loaders:
        # Ranks that are alike where they should not be have the tone of the worst finding at this line
        here = (loader.file, loader.line)
        own = [each.severity for each in findings if any((place.file, place.line) == here for place in each.where)]
        rows += _rows(loader, TONES[min(own, key=lambda severity: severity.order)] if own else bl.Tone.PLAIN)
    if not rows:
        return
    shown = rows[: bl.MAX_ROWS]
    blamed = {rank for finding in findings for rank in finding.ranks}
    ranks = sorted({rank for _, cells in shown for rank in cells})
    # Where all ranks are named, no rank needs a mark.
    marked = blamed if not blamed.issuperset(ranks) else set()

    def name(those: Sequence[int]) -> str:
        return (bl.MARK if marked.intersection(those) else "") + format_ranks(those)

    named = (NAMED,) if marked.intersection(ranks) else ()
    legend = (SAME_ORDER, *named, *bl.not_shown(len(rows) - len(shown), "row"))
    yield bl.grid_by_member("what ranks took from loaders", shown, ranks, name, axes=("pass", "rank"), legend=legend)


def _rows(loader: LoaderTaken, tone: bl.Tone) -> Iterator[bl.Row]:
    """Yield a row for each pass. An order has one letter in all passes, so that repeated epochs are seen too."""
    orders = dict.fromkeys(row.order for one in loader.passes for row in one.ranks if row.order)
    letters = {order: letter(number) for number, order in enumerate(orders)}
    taken = Counter(row.order for one in loader.passes for row in one.ranks)
    for one in loader.passes:
        cells = {}
        for row in one.ranks:
            more = "" if row.complete else ", not to the end"
            drawn = "" if row.drawn is None else f", {count_of(row.drawn, 'index', 'indices')}"
            cells[row.rank] = bl.GridCell(
                f"{letters.get(row.order, '')} {row.batches}".strip(),
                tone=tone if row.order and taken[row.order] > 1 else bl.Tone.PLAIN,
                about=f"{count_of(row.batches, 'batch', 'batches')}{drawn}{more}",
            )
        yield f"{loader.file.rpartition('/')[2]}:{loader.line}, pass {one.number}", cells


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node that grows."""

    ranks: list[int] = field(default_factory=list)
    below: dict[str, _Node] = field(default_factory=dict)


def stack_tree(rows: tuple[RankRow, ...], verdict: Finding | None) -> bl.Tree | None:
    root = _Node()
    room = MOST_NODES
    for row in sorted(rows, key=lambda row: row.rank):
        node = root
        for frame in row.stack[-MOST_FRAMES:]:
            if frame not in node.below:
                if not room:
                    break
                room -= 1
                node.below[frame] = _Node()
            node = node.below[frame]
            node.ranks.append(row.rank)
    if not root.below:
        return None
    # The lines that the verdict names, each with its ranks
    blamed = grouped(((place.file, place.line), place.rank) for place in (verdict.where if verdict is not None else ()))
    return bl.Tree(title="Stacks of the main threads", roots=tuple(_build(root.below, blamed)))


def _build(below: Mapping[str, _Node], blamed: Mapping[tuple[str, int], Sequence[int]]) -> Iterator[bl.TreeNode]:
    for frame, node in sorted(below.items(), key=lambda item: (-len(item[1].ranks), item[1].ranks)):
        parts = _FRAME.fullmatch(frame)
        file, line = (parts["file"], int(parts["line"])) if parts and len(parts["line"]) < 10 else (frame, 0)
        place = f"{_PACKAGE.sub('', file)}:{line}" if line else file
        yield bl.TreeNode(
            text=f"{place} in {parts['function']}" if parts else place,
            ranks=tuple(node.ranks),
            strong=not _LIBRARY.search(file),
            blamed=any(rank in node.ranks for rank in blamed.get((file, line), ())),
            children=tuple(_build(node.below, blamed)),
        )


def job_pictures(report: Report) -> Iterator[bl.Block]:
    """Yield the pictures of a job that its report has. Damaged data costs its picture and nothing else."""
    timeline = read_picture(Timeline, report.data.get("timeline"))
    if timeline is not None and timeline.lanes:
        yield timeline
    waits = read_picture(RankWaits, report.data.get("waits"))
    if waits is not None and waits.links:
        known = tuple(link for link in waits.links if 0 <= min(link) <= max(link) < len(waits.classes))
        yield replace(waits, links=known)
    source = read_picture(SourceExcerpt, report.data.get("source"))
    if source is not None:
        yield source
    if (tree := stack_tree(report.ranks, report.verdict)) is not None:
        yield tree


def job_content(report: Report) -> bl.Content:
    """Return the content of a job. If it ended well without findings, that is a line, or two with compared replicas."""
    attempts = read_attempts(report)
    earlier = {finding for attempt in attempts[:-1] for finding in as_earlier(attempt)}
    ended_badly = report.job is not None and report.job.ended_badly
    shows_places = ended_badly or (report.job is not None and report.job.status is JobStatus.RUNNING)
    replicas = None if ended_badly else replica_words(report)
    restarts = len(attempts) - 1
    # Say that ranks lacked cores, which is why they made no progress for a while
    most_s = max((row.starved_s for row in report.ranks), default=0.0)
    starved: tuple[str, ...] = ()
    if most_s >= NOTABLE_S:
        ranks = rank_list(row.rank for row in report.ranks if row.starved_s >= NOTABLE_S)
        without = f"without a core, {ranks} made no progress for up to {most_s:.0f} s"
        starved = (f"cores are short: {without}; this time does not count as a hang",)
    # The sections of the restarted attempts, and the heading of the last one
    attempt_sections: list[bl.Section] = []
    for attempt in attempts[:-1]:
        attempt_sections.append((bl.Heading(f"attempt {attempt.attempt}: {_ending(attempt)}, then restarted"),))
        attempt_sections += places_of(attempt.ranks, attempt.verdict)
        if (verdict := attempt.verdict) is None:
            attempt_sections.append((bl.Text("no cause found", indent=2),))
            continue
        wrong = bl.FactEntry("wrong", (verdict.summary,))
        where = bl.FactEntry("where", merge_places(verdict.where))
        title = bl.Text(title_of(verdict, hosts=False), tone=TONES[verdict.severity], indent=2)
        attempt_sections.append((title, bl.FactList((wrong, where), width=LABEL_WIDTH)))
    if attempts:
        attempt_sections.append((bl.Heading(f"attempt {attempts[-1].attempt}, the last: {_ending(attempts[-1])}"),))
    sections = places_of(report.ranks, report.verdict) if shows_places else speed_sections(report)
    # The time of a step is a picture if no section has it
    asks = speed_data(report).get("asked") or any(finding.code == STRAGGLER for finding in report.findings)
    has_bars = any(isinstance(block, bl.Bars) for section in sections for block in section)
    return bl.Content(
        headline=_headline(report, restarts),
        tone=bl.Tone.PLAIN if ended_badly else speed_headline(report)[1],
        status=status_words(report, restarts),
        sections=(*attempt_sections, *sections),
        remarks=(*(() if replicas is None else (replicas,)), *starved),
        ends_with_verdict=True,
        others=tuple(finding for finding in report.findings if finding != report.verdict and finding not in earlier),
        draw_pictures=lambda: (
            *job_pictures(report),
            *consistency_pictures(read_picture(Consistency, report.data.get("consistency")), report.findings),
            *loader_pictures(report),
            *(speed_bars(report) if asks and not ended_badly and not has_bars else ()),
        ),
    )


def read_attempts(report: Report) -> tuple[Attempt, ...]:
    """Return the attempts of a job that was restarted, or nothing if it was not."""
    return read_part(tuple[Attempt, ...], report.data.get("sections"), "attempts") or ()


def _headline(report: Report, restarts: int) -> str:
    """Return the verdict. If there is none, a job that ended badly must not read like one that ended well."""
    if report.verdict is not None:
        return report.verdict.summary
    if report.job is not None and report.job.status is JobStatus.INTERRUPTED:
        by_user = report.job.exit_status == ExitStatus.INTERRUPTED
        how = "Ctrl-C (SIGINT) interrupted the job" if by_user else "the job was interrupted"
        return f"{how}, and no fault was found before"
    if report.job is not None and report.job.ended_badly:
        return "no cause found"
    if report.job is not None and report.job.exit_status:
        if report.job.status is JobStatus.NOT_RUN:
            return f"no rank ran: the launcher ended with status {report.job.exit_status}"
        at_exit = (finding.summary for finding in report.findings if finding.kind == "exit-abort")  # an info
        return next(at_exit, f"the ranks finished, but the launcher ended with status {report.job.exit_status}")
    if restarts > 0:
        return f"the job finished after {count_of(restarts, 'restart')}"
    crashed = sum(check.outcome is Outcome.CRASHED for check in report.checks)
    found = speed_headline(report)[0] or "no problem found"
    return f"no problem found, but {count_of(crashed, 'check')} crashed" if crashed else found


def status_words(report: Report, restarts: int) -> str:
    """Say how the job ended, and how many findings there are without a verdict."""
    words = []
    if report.job is not None:
        after = "after the crash" if report.verdict is not None and report.verdict.kind == "crash" else ""
        more = {JobStatus.HUNG: after, JobStatus.INTERRUPTED: after, JobStatus.RUNNING: "(interim report)"}
        words.append(f"{report.job.status.value} {more.get(report.job.status, '')}".rstrip())
        words += [] if report.job.world_size is None else [count_of(report.job.world_size, "rank")]
        words += [f"exit status {report.job.exit_status}"] if report.job.exit_status else []
    words += [f"after {count_of(restarts, 'restart')}"] if restarts > 0 else []
    words += [count_findings(report.findings)] if report.findings and not report.verdict else []
    return ", ".join(words)


def _ending(attempt: Attempt) -> str:
    return attempt.status.value + (f" after {attempt.seconds:.1f} s" if attempt.seconds is not None else "")


def replica_words(report: Report) -> str | None:
    """Return how often replicas were compared, and the result. None if they were not compared or findings say it."""
    consistency = read_part(Consistency, report.data.get("consistency"), "replicas")
    problems = (finding for finding in report.findings if finding.severity is not Severity.INFO)
    if consistency is None or any(finding.code.startswith(REPLICAS) for finding in problems):
        return None
    compared = [stream for stream in consistency.streams if stream.compared and stream.model > 0]
    if not compared:
        return None
    # Say how often and up to which step, by the best clock only, because other clocks check the same tensors
    clock = next(clock for clock in BEST_CLOCKS if any(stream.clock is clock for stream in compared))
    those = [stream for stream in compared if stream.clock is clock]
    last = max(stream.last_number or 0 for stream in those)
    until = {StreamClock.STEP: f"up to optimizer step {last}", StreamClock.END: "at the end"}
    checks = count_of(sum(stream.compared for stream in those), "check")
    models = len({(stream.group, stream.ranks, stream.model) for stream in those})
    parts = [
        *([count_of(models, "model")] if models > 1 else []),
        count_of(sum(stream.tensors for stream in those), "tensor"),
        count_of(len({rank for stream in those for rank in stream.ranks}), "rank"),
    ]
    checks = f"{checks} {until.get(clock, f'up to backward {last}')} ({', '.join(parts)})"
    differing = dict.fromkeys(difference.what for stream in compared for difference in stream.differences)
    if not differing:
        every = max(stream.every for stream in compared)
        chosen = f"; every {every} steps, to take less than 1 % of the time" if every >= SPARSE_STEPS else ""
        return f"replicas equal: {checks}{chosen}"
    nouns = " and ".join(NOUN[what] for what in differing)
    return f"replicas compared: {checks}; {nouns} differ, but no rule reports this as wrong"


def logs_content(report: Report) -> bl.Content:
    """Return what was read, the ranks by what they did, and what to collect if the cause cannot be told."""
    about = report.data["evidence"]
    about = about if isinstance(about, dict) else {}
    counts = [about.get(name) for name in ("lines", "runs", "files", "unknown_files")]
    lines, runs, files, unknown = (count if isinstance(count, int) else 0 for count in counts)
    read = count_of(files, "file") + (f", {count_of(lines, 'line')}" if lines else "")
    which = f", the last of {runs} runs" if runs > 1 else ""
    status = str(about.get("job") or f"{read}{which}")
    # The verdict, or why there is none
    headline = "no problem found: the job moves" if about.get("moves") else "no problem found"
    if report.verdict is not None:
        headline = report.verdict.summary
    elif any(check.outcome is Outcome.INCONCLUSIVE for check in report.checks):
        headline = "cannot tell the cause from this"
    # Why the cause cannot be told, and what to collect, one instruction a line
    lacking: tuple[bl.Section, ...] = ()
    if about.get("unclear"):
        steps = tuple(str(step) for step in about.get("collect") or ())
        facts = (bl.FactEntry("unclear", (str(about["unclear"]),)), bl.FactEntry("to do", steps))
        lacking = ((bl.FactList(facts, width=LABEL_WIDTH),),)
    notes = [str(note) for note in about.get("notes") or ()]
    # What the files were, which ranks were seen, and what could not be read
    seen = [rank for rank in about.get("seen_ranks") or () if isinstance(rank, int)]
    of = f" of {about['world_size']}" if isinstance(about.get("world_size"), int) else ""
    ranks = f"{len(seen)}{of}: {format_numbers(seen)}" if seen else "no rank is named"
    problems = [str(one) for one in about.get("not_read") or ()]
    what = (
        bl.FactEntry("read", (", ".join(map(str, about.get("formats") or ())),)),
        bl.FactEntry("ranks", (ranks,)),
        bl.FactEntry("run", (str(about.get("run")),) if runs > 1 else ()),
        bl.FactEntry("skipped", tuple(problems[:MOST_PROBLEMS])),
        bl.FactEntry("unknown", (count_of(unknown, "file"),) if unknown else ()),
    )
    return bl.Content(
        headline=headline,
        status=", ".join(filter(None, (status, count_findings(report.findings)))),
        about=((bl.FactList(what, width=LABEL_WIDTH),),),
        sections=(
            *places_of(report.ranks, report.verdict),
            *(((bl.items(notes, "  note: "),),) if notes else ()),
            *lacking,
        ),
        ends_with_verdict=True,
        draw_pictures=lambda: job_pictures(report),
        others=tuple(finding for finding in report.findings if finding != report.verdict),
    )
