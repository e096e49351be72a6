"""The reports of checks: of machines, of checkpoints, of two saved files, and of how a loader shares data out."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import decode
from ddpdoctor.model.data import Drawn, Shares, Sharing, count_both
from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.saved import Checksums, DiffFacts, Kind, ReadState, StatePart
from ddpdoctor.model.words import count_of, first_names, format_numbers, grouped, majority_of, rank_list
from ddpdoctor.report.blocks import (
    MARK,
    MAX_COLUMNS,
    MAX_ROWS,
    Content,
    Grid,
    GridCell,
    Text,
    Tone,
    grid_by_member,
    items,
    linear_level,
    not_shown,
    table_of,
)
from ddpdoctor.report.findings import (
    OUTCOME_TONES,
    OUTCOME_WORDS,
    TONES,
    UNKNOWN,
    count_findings,
    name_check,
    severity_word,
)
from ddpdoctor.report.lines import format_hosts
from ddpdoctor.report.verbs.job import EQUAL, SAME_LETTER, letter, tone_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.model.findings import Check, Finding, Report
    from ddpdoctor.report.blocks import Row, Section

DIFFERS = f"{MARK}hosts with other results than most"
QUIET = (Outcome.PASSED, Outcome.SKIPPED)
MAX_NAMED = 12  # how many of the checks of a row are named
MAX_NAMES = 3  # how many files of a column are named
SIZES = {"GB": 10**9, "MB": 10**6, "kB": 10**3}
MAX_TENSORS = 30  # The most tensors in the table (our choice). The report's data has all of them.
HEADS = ("", "what", "differ", "of", "largest", "relative")
LEGEND = "The darker, the more of their samples two ranks have in common. On the diagonal: those of one rank."
SHARES_HEAD = ("ranks", "samples", "repeated", "batches", "last batch", "left out")
DRAWN_HEAD = ("pass", "ranks", "samples", "repeated", "batches", "last batch")
SHARED_BY = {Sharing.SAMPLER: "split by DistributedSampler", Sharing.SPLIT: "split by hand", Sharing.NONE: "not split"}


def machine_pictures(report: Report) -> Iterator[Grid]:
    """Yield the grid of checks by hosts. Nothing if the report is not about machines."""
    named = report.data.get("hosts")
    hosts = list(dict.fromkeys(one for one in named if isinstance(one, str))) if isinstance(named, list) else []
    if not hosts or not report.checks:
        return
    # The rows of each group: those of checks that say something, then counts of the others by outcome
    rows: list[Row] = []
    by_kind = grouped((finding.kind, finding) for finding in report.findings)
    for group, checks in grouped((check.group, check) for check in report.checks).items():
        quiet = [check for check in checks if (check.outcome in QUIET and not check.hosts and check.id not in by_kind)]
        prefix = f"{group}: " if group else ""
        for check in checks:
            if check not in quiet:
                findings = by_kind.get(check.id, [])
                by_host = grouped((host, finding) for finding in findings for host in (finding.hosts or ("",)))
                own = [[*by_host.get(host, ()), *by_host.get("", ())] for host in hosts]
                cells = {at: _cell(check, own[at], host, found=bool(findings)) for at, host in enumerate(hosts)}
                rows.append((f"{prefix}{name_check(check)}", cells))
        for outcome in QUIET:
            if names := [name_check(check) for check in quiet if check.outcome is outcome]:
                word, about = OUTCOME_WORDS[outcome], first_names(names, MAX_NAMED)
                cell = GridCell(word, tone=OUTCOME_TONES[outcome], about=about)
                rows.append((f"{prefix}{len(names)} {word}", dict.fromkeys(range(len(hosts)), cell)))
    shown = rows[:MAX_ROWS]
    sides = list(grouped((tuple(cells[at] for _, cells in shown), at) for at in range(len(hosts))).values())
    most = frozenset(majority_of(sides))
    marked = len(sides) > 1 and bool(most)

    def name(those: Sequence[int]) -> str:
        differs = marked and those[0] not in most
        return (MARK if differs else "") + format_hosts(hosts[at] for at in those)

    legend = (*((DIFFERS,) if marked else ()), *not_shown(len(rows) - len(shown), "check"))
    yield grid_by_member("checks by host", shown, range(len(hosts)), name, axes=("check", "host"), legend=legend)


def _cell(check: Check, own: Sequence[Finding], host: str, *, found: bool) -> GridCell:
    """Return the cell of a check at a host, by its ``own`` findings there; ``found``: it has some anywhere."""
    if own:
        worst = min((one.severity for one in own), key=lambda severity: severity.order)
        about = "; ".join(one.summary for one in own)
        return GridCell(severity_word(worst), tone=TONES[worst], about=about)
    everywhere = not check.hosts and (not found or check.outcome is Outcome.PASSED)
    if everywhere or host in check.hosts:
        word, tone = OUTCOME_WORDS[check.outcome], OUTCOME_TONES[check.outcome]
        return GridCell(word, tone=tone, about=check.seen or check.reason)
    if check.outcome is Outcome.PASSED:
        return GridCell(OUTCOME_WORDS[Outcome.SKIPPED], tone=Tone.SKIPPED)
    return GridCell("-", about="no problem known here")


def checklist_content(report: Report, *about: Section, pictures: Callable[[], Iterable[Grid]] = tuple) -> Content:
    """Return the content of checks. ``about`` describes what was checked. Of machines, they are drawn by host too."""
    hosts = report.data.get("hosts")
    count = len(hosts) if isinstance(hosts, list) else 0
    # The verdict. If there is none, say "no problem found" only if something was checked.
    outcomes = Counter(check.outcome for check in report.checks)
    headline = "nothing was checked" if outcomes.keys() <= {Outcome.SKIPPED} else "cannot tell"
    unknown = ((outcomes[each], word) for each, word in OUTCOME_WORDS.items() if each in UNKNOWN)
    untold = [f"{count_of(times, 'check')} {word}" for times, word in unknown if times]
    if report.verdict is not None:
        headline = report.verdict.summary
    elif Outcome.PASSED in outcomes or not outcomes:
        headline = f"no problem found{', but ' if untold else ''}{' and '.join(untold)}"
    # With --nnodes, world_size counts nodes, not ranks.
    ranks = report.data.get("world_size") if report.data.get("launcher") not in ("none", "nnodes") else None
    parts = [count_of(count, "host") if count > 1 else "", count_of(ranks, "rank") if isinstance(ranks, int) else ""]
    return Content(
        headline=headline,
        tone=Tone.WARNING if untold else Tone.PLAIN,
        status=", ".join(filter(None, (*parts, count_findings(report.findings)))),
        about=about,
        several_hosts=count > 1,
        draw_pictures=lambda: (*machine_pictures(report), *pictures()),
        is_checklist=True,
    )


def checkpoint_pictures(files: Sequence[Mapping[str, Any]]) -> Iterator[Grid]:
    if not files:
        return
    paths = [str(file.get("path")) for file in files]
    short = [PurePath(path).name for path in paths]
    names = short if len(set(short)) == len(short) else paths
    parts = [file.get("parts") for file in files]
    held = [[part for part in own if isinstance(part, str)] if isinstance(own, list) else [] for own in parts]
    kinds = [part.value for part in StatePart if any(part.value in own for own in held)]
    yes, no = GridCell("yes", tone=Tone.GOOD), GridCell("no", tone=Tone.NOTE)
    rows: dict[str, dict[int, GridCell]] = {"read": {}, "checksums": {}, "NaN and infinity": {}, "tensors": {}}
    for at, one in enumerate(files):
        state, checksums = str(one.get("state")), str(one.get("checksums", Checksums.NOT_READ.value))
        is_whole, is_checked = state == ReadState.WHOLE.value, checksums == Checksums.CHECKED.value
        found, count = one.get("not_finite"), one.get("tensors")
        if isinstance(found, int) and found > 0:
            values = GridCell(f"in {count_of(found, 'tensor')}", tone=Tone.WARNING)
        elif one.get("values_looked_at") is True:
            good = found == 0
            values = GridCell("none" if good else "looked for", tone=Tone.GOOD if good else Tone.PLAIN)
        else:
            values = GridCell("not looked for", tone=Tone.SKIPPED)
        rows["read"][at] = GridCell(state, tone=Tone.GOOD if is_whole else Tone.ERROR)
        rows["checksums"][at] = GridCell(checksums, tone=Tone.GOOD if is_checked else Tone.SKIPPED)
        rows["NaN and infinity"][at] = values
        known = isinstance(count, int)
        rows["tensors"][at] = GridCell(str(count) if known else "?", tone=Tone.PLAIN if known else Tone.SKIPPED)
    rows |= {part: {at: yes if part in own else no for at, own in enumerate(held)} for part in kinds}

    def name(those: Sequence[int]) -> str:
        return first_names([names[at] for at in those], MAX_NAMES)

    title = "what could be read of each file, and what it holds"
    yield grid_by_member(title, list(rows.items()), range(len(files)), name, axes=("", "file"))


def checkpoint_content(report: Report) -> Content:
    files = report.data["files"]
    known = [file for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    lines = []
    for one in known:
        tensors, size_bytes, parts = one.get("tensors"), one.get("size_bytes"), one.get("parts")
        size_bytes = size_bytes if isinstance(size_bytes, int) else 0
        # A size as a file manager shows it. Findings about truncated files give exact bytes.
        units = (f"{size_bytes / size:.3g} {unit}" for unit, size in SIZES.items() if size_bytes >= size)
        facts = [f"{one.get('form')}, {one.get('state')}", next(units, count_of(size_bytes, "byte"))]
        facts += [count_of(tensors, "tensor")] if isinstance(tensors, int) else []
        facts += map(str, parts) if isinstance(parts, list) else ()
        lines.append(f"{one.get('path')}: {', '.join(facts)}")
    return checklist_content(report, (items(lines),), pictures=lambda: checkpoint_pictures(known))


def diff_pictures(facts: DiffFacts, findings: Iterable[Finding]) -> Iterator[Grid]:
    """Yield a grid of contents by files, equal files in one column. Nothing if the files are equal."""
    unequal = [one for one in facts.unequal if one.kind is not Kind.RANDOM]
    if not unequal:
        return
    tone = tone_of(findings)
    files = range(len(facts.files))
    rows: list[Row] = []
    for part in unequal[:MAX_ROWS]:
        cells = dict.fromkeys(part.absent_in, GridCell("none", tone=tone, about="not in this file"))
        most, apart = majority_of(part.sides), {each.file: each for each in part.apart}
        for number, side in enumerate(part.sides):
            measured = next((apart[file] for file in side if file in apart), None)
            about = list(part.seen[number : number + 1])
            if measured is not None:
                of = count_of(measured.of, "element")
                figures = [
                    f"{measured.differing} of {of} differ from file {measured.against + 1}",
                    *([f"by {measured.largest:.3g} at most"] if measured.largest is not None else []),
                    *([f"relative {measured.relative:.2g}"] if measured.relative is not None else []),
                    *([f"{measured.not_finite} not finite"] if measured.not_finite else []),
                ]
                about.append(", ".join(figures))
            off = f", off by {measured.largest:.2g}" if measured and measured.largest else ""
            own_tone = Tone.PLAIN if side is most and not part.absent_in else tone
            cell = GridCell(letter(number) + off, tone=own_tone, about="; ".join(filter(None, about)))
            cells.update(dict.fromkeys(side, cell))
        rows.append((f"{part.name} ({part.kind.value})", cells))
    equal = facts.tensors + facts.values - len(facts.incomparable) - len(facts.unequal)
    if equal > 0:
        rows.append((count_of(equal, "other"), dict.fromkeys(files, GridCell(EQUAL, tone=Tone.GOOD))))

    def name(those: Sequence[int]) -> str:
        named, rank = rank_list((number + 1 for number in those), noun="file"), facts.files[those[0]].rank
        return named if len(those) > 1 or rank is None else f"{named} (rank {rank})"

    legend = (SAME_LETTER, *not_shown(len(unequal) - MAX_ROWS, "differing tensor or value"))
    yield grid_by_member("contents that differ", rows, files, name, axes=("tensor or value", "file"), legend=legend)


def diff_content(report: Report) -> Content:
    facts = decode(DiffFacts, report.data["diff"])
    files = []
    for number, one in enumerate(facts.files, start=1):
        rank = "" if one.rank is None else f" (rank {one.rank})"
        beside = f"; {count_of(one.beside, 'other tensor')} not compared" if one.beside else ""
        below = f" below {one.below.rstrip('.')!r}{beside}" if one.below else ""
        files.append(f"file {number}: {one.path}{rank}, {count_of(one.tensors, 'tensor')}{below}")
    compared = count_of(facts.tensors - len(facts.incomparable), "tensor")
    equal = f"equal in all {compared} that were compared, bit by bit"
    shown = [one for one in facts.unequal if one.kind is not Kind.RANDOM]
    table: tuple[Section, ...] = ()
    if shown:
        rows: list[tuple[str, ...]] = []
        for part in shown[:MAX_TENSORS]:
            if not part.apart:
                seen = " | ".join(part.seen)
                absent = f"not in file {', '.join(str(n + 1) for n in part.absent_in)}" if part.absent_in else ""
                rows.append((part.name, "; ".join(filter(None, [seen, absent])), "", "", "", ""))
            for each in part.apart:  # a row for each file that differs from the first
                against = f", file {each.file + 1} against {each.against + 1}" if len(facts.files) > 2 else ""
                largest = "" if each.largest is None else f"{each.largest:.3g}"
                relative = "" if each.relative is None else f"{each.relative:.2g}"
                what = "".join(part.seen[:1]) + against
                rows.append((part.name, what, str(each.differing), str(each.of), largest, relative))
        more = (Text(f"and {len(shown) - MAX_TENSORS} more", indent=2),) if len(shown) > MAX_TENSORS else ()
        table = ((table_of(HEADS, rows, left=2), *more),)
    return Content(
        headline=equal if report.verdict is None else report.verdict.summary,
        status=", ".join(filter(None, (count_of(len(facts.files), "file"), count_findings(report.findings)))),
        about=((items(files),),),
        sections=table,
        draw_pictures=lambda: diff_pictures(facts, report.findings),
    )


def _grid(title: str, ranks: Sequence[int], both: Sequence[Sequence[int]], count: int) -> Grid:
    names, cells = tuple(map(str, ranks)), []
    for at, rank in enumerate(ranks):
        row = []
        for other, peer in enumerate(ranks):
            shared, fewer = both[at][other], min(both[at][at], both[other][other])
            about = f"ranks {rank} and {peer}: {shared} of {count_of(fewer, 'sample')}"
            row.append(GridCell(str(shared), about=about, level=linear_level(shared, fewer)))
        about = f"rank {rank}: {count_of(both[at][at], 'sample')}"
        row[at] = GridCell(str(both[at][at]), tone=Tone.STRONG, about=about)
        cells.append(tuple(row))
    legend = (LEGEND, *not_shown(count - len(ranks), "rank"))
    return Grid(title, names, names, tuple(cells), "rank", "rank", legend)


def shares_content(report: Report) -> Content:
    shares = decode(Shares, report.data["shares"])
    drawn, repeated, batches, left_out = (
        sum(getattr(rank, name) for rank in shares.ranks) for name in ("drawn", "repeated", "batches", "left_out")
    )
    by_rank = {rank.rank: rank for rank in shares.ranks}
    alike = grouped(
        ((rank.drawn, rank.repeated, rank.batches, rank.last_batch, rank.delivered), rank.rank) for rank in shares.ranks
    )
    rows: list[tuple[str, ...]] = [
        (_each(ranks), *map(str, numbers), str(by_rank[ranks[0]].left_out)) for (*numbers, _), ranks in alike.items()
    ]
    rows.append(("in all", str(drawn), str(repeated), str(batches), "", str(left_out)))
    plan = shares.plan
    different = "; how many are different depends on each rank's shuffle"
    if shares.unique is not None:
        different = f", {shares.unique} of {plan.samples} different"
        different += f", {shares.duplicates} repeated, {shares.missed} missed"
    flags = [
        *(["sampler drop_last=True"] if plan.sampler_drop_last else []),
        *(["drop_last=True"] if plan.drop_last else []),
        "shuffled" if plan.shuffle else "in order",
    ]
    world = count_of(plan.world_size, "rank")
    sizes = f"{count_of(plan.samples, 'sample')}, {world}, batches of {plan.batch_size}"
    # The arithmetic of an epoch as a grid, unless overlaps depend on the shuffle
    pictures: list[Grid] = []
    shown = shares.ranks[:MAX_COLUMNS]
    if shares.unique is not None and len(shown) > 1:
        both = tuple(tuple(count_both(plan, share, other) for other in shown) for share in shown)
        title = "samples that two ranks both get in an epoch"
        pictures.append(_grid(title, [share.rank for share in shown], both, len(shares.ranks)))
    return checklist_content(
        report,
        (Text(f"{sizes}: {SHARED_BY[plan.sharing]}, {', '.join(flags)}"),),
        (table_of(SHARES_HEAD, rows),),
        (Text(f"an epoch: {shares.delivered} samples in batches{different}"),),
        pictures=lambda: pictures,
    )


def drawn_content(report: Report) -> Content:
    drawn = decode(Drawn, report.data["drawn"])
    notes = [Text(f"not checked: {note}") for note in drawn.notes]
    rows: list[tuple[str, ...]] = []
    totals: list[str] = []
    pictures: list[Grid] = []
    for one in drawn.passes:
        counts = []
        for row in one.ranks:
            more, repeated = "" if row.complete else "+", "?" if row.repeated is None else str(row.repeated)
            counts.append(((f"{row.drawn}{more}", repeated, f"{row.batches}{more}", str(row.last_batch)), row.rank))
        for place, (numbers, ranks) in enumerate(grouped(counts).items()):
            rows.append(("" if place else str(one.number), _each(ranks), *numbers))
        different = f", {one.unique} different, {one.shared} drawn by two ranks or more, {one.missed} by none"
        if one.unique is None:
            different = "; whether they differ was not compared"
        totals.append(f"pass {one.number}: {count_of(one.drawn, 'sample')} in all{different}")
        compared = [row.rank for row in one.ranks[: len(one.overlaps)]]  # older versions lack the counts
        if len(compared) > 1 and all(len(row) == len(compared) for row in one.overlaps):
            title = f"samples that two ranks both drew in pass {one.number}"
            pictures.append(_grid(title, compared, one.overlaps, len(one.ranks)))
    samples = "" if drawn.samples is None else f", {count_of(drawn.samples, 'sample')}"
    world = count_of(drawn.world_size, "rank")
    loader = f"{drawn.function}: {_class_name(drawn.kind)} over {_class_name(drawn.dataset)}{samples}, {world}"
    settings = (
        "" if drawn.batch_size is None else f"batches of {drawn.batch_size}",
        f"sampler {_class_name(drawn.sampler)}" if drawn.sampler else "no sampler",
        "set_epoch called before each pass" if drawn.set_epoch else "set_epoch not called",
    )
    return checklist_content(
        report,
        (Text(loader), Text(", ".join(filter(None, settings)))),
        (table_of(DRAWN_HEAD, rows),),
        (*(Text(line) for line in totals), *notes),
        pictures=lambda: pictures,
    )


def _each(ranks: Sequence[int]) -> str:
    return format_numbers(ranks) + (" each" if len(ranks) > 1 else "")


def _class_name(path: str) -> str:
    return path.rpartition(".")[2]
