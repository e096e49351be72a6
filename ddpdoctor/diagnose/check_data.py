"""Builds the reports of `check-data`: for the arithmetic of an epoch, or for what ranks really drew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.diagnose.reports import check_report
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import now
from ddpdoctor.model.sharing import RankShare, SamplingPlan, Shares, share_out
from ddpdoctor.rules.data.shared import Replicas
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.data import Drawn, RankDraws
    from ddpdoctor.model.findings import Report
    from ddpdoctor.rules.engine import Facts

VERB = "check-data"


def plan_report(plan: SamplingPlan, command: tuple[str, ...]) -> Report:
    """Return the report of the arithmetic only."""
    started_at = now()
    shares = share_out(plan)
    data = {"verb": VERB, "shares": encode(shares)}
    return check_report(rules_of("data"), {Shares: [shares]}, data, command, started_at)


def drawn_report(
    drawn: Drawn, ranks: Sequence[RankDraws], command: tuple[str, ...], started_at: str, accumulation: int
) -> Report:
    """Return the report of what ranks really drew."""
    shares = _shares(drawn, accumulation)
    facts: Facts = {Replicas: [_replicas(drawn, ranks)], **({} if shares is None else {Shares: [shares]})}
    data = {"verb": VERB, "drawn": encode(drawn)}
    return check_report(rules_of("data"), facts, data, command, started_at)


def _replicas(drawn: Drawn, ranks: Sequence[RankDraws]) -> Replicas:
    """Return the ranks as input for the data rules. These assume that the loop trains and that it may hang."""
    return Replicas(
        loaders={one.rank: (one.loader,) for one in ranks if one.loader is not None},
        size=drawn.world_size,
        world_size=drawn.world_size,
        hosts={one.rank: one.host for one in ranks},
        trained_only=False,
        ended_badly=True,
        drawn=drawn,
    )


def _shares(drawn: Drawn, accumulation: int) -> Shares | None:
    """Return the first pass in the form of the arithmetic, or None if it was incomplete."""
    if drawn.batch_size is None or not drawn.passes or not all(row.complete for row in drawn.passes[0].ranks):
        return None
    rows = drawn.passes[0].ranks
    plan = SamplingPlan(
        samples=drawn.samples or sum(row.drawn for row in rows),
        world_size=drawn.world_size,
        batch_size=drawn.batch_size,
        accumulation=accumulation,
    )
    ranks = tuple(
        RankShare(
            rank=row.rank,
            drawn=row.drawn,
            repeated=row.repeated or 0,
            batches=row.batches,
            last_batch=row.last_batch,
            delivered=row.drawn,
        )
        for row in rows
    )
    return Shares(plan=plan, ranks=ranks, delivered=sum(row.drawn for row in rows), unique=drawn.passes[0].unique)
