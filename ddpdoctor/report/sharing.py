"""The report of `check-data` as text: what each rank gets, what is wrong, the worst last, and one line that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.drawn import Drawn
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.sharing import Shares, Sharing
from ddpdoctor.report.drawn import drawn_lines
from ddpdoctor.report.page import plural
from ddpdoctor.report.ranks import format_numbers
from ddpdoctor.report.tables import draw_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.sharing import Plan, RankShare

VERB = "check-data"
HEAD = ("ranks", "samples", "repeated", "batches", "last batch", "left out")
SHARED_BY = {
    Sharing.SAMPLER: "shared out by DistributedSampler",
    Sharing.SPLIT: "split by hand",
    Sharing.NONE: "not shared out",
}


def is_sharing(report: Report) -> bool:
    """Say whether a report is one of this verb."""
    return report.data.get("verb") == VERB


def sharing_lines(report: Report) -> list[str]:
    """Return what each rank gets as lines; raises ``UserError`` where a file was damaged."""
    try:
        if "drawn" in report.data:
            return [*drawn_lines(decode(Drawn, report.data["drawn"]))]
        return [*_plan_lines(decode(Shares, report.data["shares"]))] if "shares" in report.data else []
    except WrongValue as error:
        raise UserError(f"the report cannot be read: data.{error}", help="The file is damaged: check again.") from error


def _plan_lines(shares: Shares) -> Iterator[str]:
    yield _headline(shares.plan)
    yield ""
    rows = [HEAD, *(_row(ranks, one) for ranks, one in _classes(shares)), _sum(shares)]
    yield from draw_table(rows)
    yield ""
    yield _closing(shares)


def _headline(plan: Plan) -> str:
    flags = [
        *(["sampler drop_last=True"] if plan.sampler_drop_last else []),
        *(["drop_last=True"] if plan.drop_last else []),
        "shuffled" if plan.shuffle else "in order",
    ]
    ranks = plural(plan.world_size, "rank")
    head = f"{plural(plan.samples, 'sample')}, {ranks}, batches of {plan.batch_size}"
    return f"{head}: {SHARED_BY[plan.sharing]}, {', '.join(flags)}"


def _classes(shares: Shares) -> Iterator[tuple[list[int], RankShare]]:
    """Yield ranks that get the same, with what they get."""
    found: dict[tuple[int, ...], list[int]] = {}
    for one in shares.ranks:
        found.setdefault((one.drawn, one.repeated, one.batches, one.last_batch, one.delivered), []).append(one.rank)
    for ranks in found.values():
        yield ranks, shares.ranks[ranks[0]]


def _row(ranks: Sequence[int], one: RankShare) -> tuple[str, ...]:
    numbers = (one.drawn, one.repeated, one.batches, one.last_batch, one.left_out)
    each = " each" if len(ranks) > 1 else ""
    return (format_numbers(ranks) + each, *map(str, numbers))


def _sum(shares: Shares) -> tuple[str, ...]:
    drawn, repeated, batches, left_out = (
        sum(getattr(one, name) for one in shares.ranks) for name in ("drawn", "repeated", "batches", "left_out")
    )
    return ("in all", str(drawn), str(repeated), str(batches), "", str(left_out))


def _closing(shares: Shares) -> str:
    if shares.unique is None:
        return f"an epoch: {shares.delivered} samples in batches; how many are different depends on each rank's shuffle"
    return (
        f"an epoch: {shares.delivered} samples in batches, {shares.unique} of {shares.plan.samples} different, "
        f"{shares.duplicates} repeated, {shares.missed} missed"
    )
