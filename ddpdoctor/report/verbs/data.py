"""The report of `check-data`: which samples each rank gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import decode
from ddpdoctor.model.data import Drawn, Shares, Sharing, count_both
from ddpdoctor.model.words import count_of, format_numbers, grouped
from ddpdoctor.report.blocks import MAX_COLUMNS, Grid, GridCell, Text, Tone, linear_level, not_shown, table_of
from ddpdoctor.report.verbs.checks import checklist_content

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.data import Pass, RankPass, RankShare
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Content, Section

LEGEND = "The darker, the more of their samples two ranks have in common. On the diagonal: those of one rank."


def share_pictures(shares: Shares) -> tuple[Section, ...]:
    """Return the grid for the arithmetic of an epoch, or nothing if overlaps depend on the shuffle."""
    ranks = shares.ranks[:MAX_COLUMNS]
    if shares.unique is None or len(ranks) < 2:
        return ()
    both = tuple(tuple(count_both(shares.plan, one, other) for other in ranks) for one in ranks)
    grid = _grid("samples that two ranks both get in an epoch", [one.rank for one in ranks], both, len(shares.ranks))
    return ((grid,),)


def drawn_pictures(drawn: Drawn) -> tuple[Section, ...]:
    """Return a grid for each pass whose samples were compared. Reports of older versions lack the counts."""
    grids = []
    for one in drawn.passes:
        ranks = [row.rank for row in one.ranks[: len(one.overlaps)]]
        if len(ranks) > 1 and all(len(row) == len(ranks) for row in one.overlaps):
            title = f"samples that two ranks both drew in pass {one.number}"
            grids.append((_grid(title, ranks, one.overlaps, len(one.ranks)),))
    return tuple(grids)


def _grid(title: str, ranks: Sequence[int], both: Sequence[Sequence[int]], count: int) -> Grid:
    names = tuple(map(str, ranks))
    places = range(len(ranks))
    return Grid(
        title=title,
        rows=names,
        columns=names,
        cells=tuple(tuple(_cell(ranks, both, at, other) for other in places) for at in places),
        row_name="rank",
        column_name="rank",
        legend=(LEGEND, *not_shown(count - len(ranks), "rank")),
    )


def _cell(ranks: Sequence[int], both: Sequence[Sequence[int]], at: int, other: int) -> GridCell:
    shared = both[at][other]
    if at == other:
        return GridCell(text=str(shared), tone=Tone.STRONG, about=f"rank {ranks[at]}: {count_of(shared, 'sample')}")
    fewer = min(both[at][at], both[other][other])
    about = f"ranks {ranks[at]} and {ranks[other]}: {shared} of {count_of(fewer, 'sample')}"
    return GridCell(text=str(shared), about=about, level=linear_level(shared, fewer))


SHARES_HEAD = ("ranks", "samples", "repeated", "batches", "last batch", "left out")
DRAWN_HEAD = ("pass", "ranks", "samples", "repeated", "batches", "last batch")
SHARED_BY = {Sharing.SAMPLER: "split by DistributedSampler", Sharing.SPLIT: "split by hand", Sharing.NONE: "not split"}


def shares_content(report: Report) -> Content:
    """Return the content for the arithmetic of an epoch."""
    shares = decode(Shares, report.data["shares"])
    drawn, repeated, batches, left_out = (
        sum(getattr(one, name) for one in shares.ranks) for name in ("drawn", "repeated", "batches", "left_out")
    )
    rows = [
        *(_share_row(ranks, one) for ranks, one in _classes(shares)),
        (("in all", str(drawn), str(repeated), str(batches), "", str(left_out))),
    ]
    plan = shares.plan
    flags = [
        *(["sampler drop_last=True"] if plan.sampler_drop_last else []),
        *(["drop_last=True"] if plan.drop_last else []),
        "shuffled" if plan.shuffle else "in order",
    ]
    ranks = count_of(plan.world_size, "rank")
    sizes = f"{count_of(plan.samples, 'sample')}, {ranks}, batches of {plan.batch_size}"
    return checklist_content(
        report,
        (Text(text=f"{sizes}: {SHARED_BY[plan.sharing]}, {', '.join(flags)}"),),
        (table_of(SHARES_HEAD, rows),),
        (Text(text=_describe_epoch(shares)),),
        pictures=share_pictures(shares),
    )


def drawn_content(report: Report) -> Content:
    """Return the content for passes over the user's loaders: what each rank drew, and the totals."""
    drawn = decode(Drawn, report.data["drawn"])
    notes = [Text(text=f"not checked: {note}") for note in drawn.notes]
    drawn_rows: list[tuple[str, ...]] = []
    for one in drawn.passes:
        found = grouped((_numbers(row), row.rank) for row in one.ranks)
        for place, (numbers, ranks) in enumerate(found.items()):
            drawn_rows.append(("" if place else str(one.number), _each(ranks), *map(str, numbers)))
    return checklist_content(
        report,
        tuple(Text(text=line) for line in _describe_loader(drawn)),
        (table_of(DRAWN_HEAD, drawn_rows),),
        (*(Text(text=_describe_pass(one)) for one in drawn.passes), *notes),
        pictures=drawn_pictures(drawn),
    )


def _classes(shares: Shares) -> Iterator[tuple[list[int], RankShare]]:
    """Yield groups of ranks with equal shares, and the share."""
    numbers = (
        ((one.drawn, one.repeated, one.batches, one.last_batch, one.delivered), one.rank) for one in shares.ranks
    )
    found = grouped(numbers)
    by_rank = {one.rank: one for one in shares.ranks}
    for ranks in found.values():
        yield ranks, by_rank[ranks[0]]


def _share_row(ranks: Sequence[int], one: RankShare) -> tuple[str, ...]:
    numbers = (one.drawn, one.repeated, one.batches, one.last_batch, one.left_out)
    return (_each(ranks), *map(str, numbers))


def _each(ranks: Sequence[int]) -> str:
    return format_numbers(ranks) + (" each" if len(ranks) > 1 else "")


def _describe_epoch(shares: Shares) -> str:
    if shares.unique is None:
        return f"an epoch: {shares.delivered} samples in batches; how many are different depends on each rank's shuffle"
    return (
        f"an epoch: {shares.delivered} samples in batches, {shares.unique} of {shares.plan.samples} different, "
        f"{shares.duplicates} repeated, {shares.missed} missed"
    )


def _describe_loader(drawn: Drawn) -> Iterator[str]:
    samples = "" if drawn.samples is None else f", {count_of(drawn.samples, 'sample')}"
    ranks = count_of(drawn.world_size, "rank")
    yield f"{drawn.function}: {_class_name(drawn.kind)} over {_class_name(drawn.dataset)}{samples}, {ranks}"
    batches = "" if drawn.batch_size is None else f"batches of {drawn.batch_size}"
    sampler = f"sampler {_class_name(drawn.sampler)}" if drawn.sampler else "no sampler"
    called = "set_epoch called before each pass" if drawn.set_epoch else "set_epoch not called"
    yield ", ".join(part for part in (batches, sampler, called) if part)


def _class_name(path: str) -> str:
    return path.rpartition(".")[2]


def _numbers(row: RankPass) -> tuple[object, ...]:
    more = "" if row.complete else "+"
    repeated = "?" if row.repeated is None else row.repeated
    return (f"{row.drawn}{more}", repeated, f"{row.batches}{more}", row.last_batch)


def _describe_pass(one: Pass) -> str:
    if one.unique is None:
        return f"pass {one.number}: {count_of(one.drawn, 'sample')} in all; whether they differ was not compared"
    return (
        f"pass {one.number}: {count_of(one.drawn, 'sample')} in all, {one.unique} different, "
        f"{one.shared} drawn by two ranks or more, {one.missed} by none"
    )
