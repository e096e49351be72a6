"""The report of `check-data`: which samples each rank gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import decode
from ddpdoctor.model.data import Drawn, Shares, Sharing, count_both
from ddpdoctor.model.words import count_of, format_numbers, grouped
from ddpdoctor.report.blocks import MAX_COLUMNS, Grid, GridCell, Text, Tone, linear_level, not_shown, table_of
from ddpdoctor.report.verbs.checks import checklist_content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Content, Section

LEGEND = "The darker, the more of their samples two ranks have in common. On the diagonal: those of one rank."


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
    by_rank = {one.rank: one for one in shares.ranks}
    alike = grouped(
        ((one.drawn, one.repeated, one.batches, one.last_batch, one.delivered), one.rank) for one in shares.ranks
    )
    rows: list[tuple[str, ...]] = []
    for (*numbers, _), ranks in alike.items():
        rows.append((_each(ranks), *map(str, numbers), str(by_rank[ranks[0]].left_out)))
    rows.append(("in all", str(drawn), str(repeated), str(batches), "", str(left_out)))
    plan = shares.plan
    different = "; how many are different depends on each rank's shuffle"
    if shares.unique is not None:
        different = (
            f", {shares.unique} of {plan.samples} different, {shares.duplicates} repeated, {shares.missed} missed"
        )
    flags = [
        *(["sampler drop_last=True"] if plan.sampler_drop_last else []),
        *(["drop_last=True"] if plan.drop_last else []),
        "shuffled" if plan.shuffle else "in order",
    ]
    world = count_of(plan.world_size, "rank")
    sizes = f"{count_of(plan.samples, 'sample')}, {world}, batches of {plan.batch_size}"
    # The arithmetic of an epoch as a grid, unless overlaps depend on the shuffle
    pictures: tuple[Section, ...] = ()
    shown = shares.ranks[:MAX_COLUMNS]
    if shares.unique is not None and len(shown) > 1:
        both = tuple(tuple(count_both(plan, one, other) for other in shown) for one in shown)
        title = "samples that two ranks both get in an epoch"
        pictures = ((_grid(title, [one.rank for one in shown], both, len(shares.ranks)),),)
    return checklist_content(
        report,
        (Text(text=f"{sizes}: {SHARED_BY[plan.sharing]}, {', '.join(flags)}"),),
        (table_of(SHARES_HEAD, rows),),
        (Text(text=f"an epoch: {shares.delivered} samples in batches{different}"),),
        pictures=lambda: pictures,
    )


def drawn_content(report: Report) -> Content:
    """Return the content for passes over the user's loaders: what each rank drew, and the totals."""
    drawn = decode(Drawn, report.data["drawn"])
    notes = [Text(text=f"not checked: {note}") for note in drawn.notes]
    rows: list[tuple[str, ...]] = []
    totals: list[str] = []
    pictures: list[Section] = []
    for one in drawn.passes:
        marked = ((row, "" if row.complete else "+") for row in one.ranks)
        found = grouped(
            (
                (
                    f"{row.drawn}{more}",
                    "?" if row.repeated is None else str(row.repeated),
                    f"{row.batches}{more}",
                    str(row.last_batch),
                ),
                row.rank,
            )
            for row, more in marked
        )
        for place, (numbers, ranks) in enumerate(found.items()):
            rows.append(("" if place else str(one.number), _each(ranks), *numbers))
        different = f", {one.unique} different, {one.shared} drawn by two ranks or more, {one.missed} by none"
        if one.unique is None:
            different = "; whether they differ was not compared"
        totals.append(f"pass {one.number}: {count_of(one.drawn, 'sample')} in all{different}")
        compared = [row.rank for row in one.ranks[: len(one.overlaps)]]  # older versions lack the counts
        if len(compared) > 1 and all(len(row) == len(compared) for row in one.overlaps):
            title = f"samples that two ranks both drew in pass {one.number}"
            pictures.append((_grid(title, compared, one.overlaps, len(one.ranks)),))
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
        (Text(text=loader), Text(text=", ".join(filter(None, settings)))),
        (table_of(DRAWN_HEAD, rows),),
        (*(Text(text=line) for line in totals), *notes),
        pictures=lambda: tuple(pictures),
    )


def _each(ranks: Sequence[int]) -> str:
    return format_numbers(ranks) + (" each" if len(ranks) > 1 else "")


def _class_name(path: str) -> str:
    return path.rpartition(".")[2]
