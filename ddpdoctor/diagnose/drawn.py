"""Judges what ranks were seen to draw: by the rules of data, and by exact counts where their indices were compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.diagnose.answers import found, outcome
from ddpdoctor.model.findings import Check, Confidence, Finding, Outcome, Severity
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.model.sharing import Plan, RankShare, Shares
from ddpdoctor.rules.data.contents import same_contents
from ddpdoctor.rules.data.duplicates import check_duplicates, duplicates
from ddpdoctor.rules.data.epochs import check_epochs, unset_epochs
from ddpdoctor.rules.data.replicas import Replicas
from ddpdoctor.rules.data.shards import check_shards, gaps
from ddpdoctor.rules.data.uneven import check_batches, uneven
from ddpdoctor.rules.registry import rule_of
from ddpdoctor.rules.ruling import Ruling
from ddpdoctor.rules.sharing.judge import CHECKS as OF_ARITHMETIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpdoctor.model.drawn import Drawn, Pass, Told
    from ddpdoctor.rules.answers import Problem
    from ddpdoctor.rules.registry import Rule

GROUP = "data"
"""Under which the checks of data are shown."""
ONE_RANK = "one rank has nothing to share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What was found, and how each check came out."""

    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]


def judge_drawn(drawn: Drawn, told: Sequence[Told], accumulation: int) -> Judged:
    """Put what was drawn before all rules of data."""
    replicas = Replicas(
        loaders={one.rank: (one.loader,) for one in told if one.loader is not None},
        size=drawn.world_size,
        world_size=drawn.world_size,
        hosts={one.rank: one.host for one in told},
        trained_only=False,
    )
    exact = drawn.passes if _holds_same_samples(told) else ()
    asked = (
        _ask(check_duplicates, duplicates, replicas, lambda ruling: _say_exactly(ruling, exact)),
        _ask(check_epochs, unset_epochs, replicas, lambda ruling: _see_order(ruling, drawn, told)),
        _ask(check_shards, gaps, replicas, lambda ruling: _find_overlap(_say_exactly(ruling, exact), exact, drawn)),
        _ask(check_batches, uneven, replicas, _as_error),
    )
    findings = [finding for ruling, _ in asked for finding in ruling.findings]
    checks = [check for _, check in asked]
    for rule, problems, check in _ask_arithmetic(drawn, accumulation):
        findings += [found(rule, problem) for problem in problems]
        checks.append(check)
    return Judged(findings=tuple(findings), checks=tuple(checks))


def _ask(
    check: Callable[..., Ruling],
    judge: Callable[[Replicas], Ruling],
    replicas: Replicas,
    add: Callable[[Ruling], Ruling],
) -> tuple[Ruling, Check]:
    """Return what a rule says, with what exact counts add to it. A rule that raises is a crashed check."""
    rule = rule_of(check)
    if replicas.size == 1:
        return Ruling(), _check(rule, Outcome.SKIPPED, ONE_RANK)
    try:
        ruling = add(judge(replicas))
    except Exception as error:  # noqa: BLE001 - the wall around a rule
        return Ruling(), _check(rule, Outcome.CRASHED, f"{type(error).__name__}: {error}")
    if ruling.findings:
        is_note = all(one.severity is Severity.INFO for one in ruling.findings)
        return ruling, _check(rule, Outcome.PASSED if is_note else Outcome.FAILED, ruling.findings[0].summary)
    if ruling.skipped or ruling.inconclusive:
        kind = Outcome.SKIPPED if ruling.skipped else Outcome.INCONCLUSIVE
        return ruling, _check(rule, kind, ruling.skipped or ruling.inconclusive)
    return ruling, _check(rule, Outcome.PASSED, _PASSED[rule.code])


_PASSED = {
    "DD701": "no two ranks draw the same samples",
    "DD702": "passes come in different orders; whether your script calls set_epoch is not looked at here",
    "DD703": "the shares of the ranks fit together",
    "DD704": "all ranks have equally many batches",
}


def _check(rule: Rule, kind: Outcome, text: str) -> Check:
    ran = kind in {Outcome.PASSED, Outcome.FAILED}
    return Check(
        id=rule.kind, code=rule.code, group=GROUP, outcome=kind, seen=text if ran else "", reason="" if ran else text
    )


def _holds_same_samples(told: Sequence[Told]) -> bool:
    """Return whether equal indices are equal samples: unless a look at some of them has shown that they are not."""
    loaders = [one.loader for one in told if one.loader is not None]
    first = loaders[0]
    return all(same_contents((first, other), (first.epochs[0], other.epochs[0])) is not False for other in loaders[1:])


def _say_exactly(ruling: Ruling, passes: Sequence[Pass]) -> Ruling:
    """Add exact counts to what was found by sums."""
    words = tuple(_count_words(one) for one in passes if one.unique is not None)
    if not words:
        return ruling
    return replace(
        ruling, findings=tuple(replace(one, evidence=(*words[:1], *one.evidence)) for one in ruling.findings)
    )


def _count_words(one: Pass) -> str:
    return (
        f"counted index by index in pass {one.number}: {one.drawn} drawn in all, {one.unique} different, "
        f"{one.shared} of them by two ranks or more; {one.missed} drawn by none"
    )


def _find_overlap(ruling: Ruling, passes: Sequence[Pass], drawn: Drawn) -> Ruling:
    """Find shares that overlap and leave samples out, which sums alone do not tell."""
    if ruling.findings:
        return ruling
    counted = [one for one in passes if one.unique is not None and one.missed is not None]
    if not counted:
        return ruling
    for one in counted:
        if any(row.repeated for row in one.ranks):
            return Ruling(skipped="ranks draw with replacement, or repeat samples: shares are not meant to fit")
        beyond = _drawn_in_vain(one, drawn)
        if beyond and not one.alike:
            return Ruling(findings=(_overlap(one, beyond),))
    return Ruling()


def _drawn_in_vain(one: Pass, drawn: Drawn) -> int:
    """Count samples drawn again while others are drawn by none: padding repeats only where all are drawn."""
    return min(one.drawn - (one.unique or 0), one.missed or 0) if drawn.samples else 0


def _overlap(one: Pass, beyond: int) -> Finding:
    rule = rule_of(check_shards)
    ranks = tuple(row.rank for row in one.ranks)
    return Finding(
        code=rule.code,
        kind=rule.kind,
        severity=Severity.WARNING,
        confidence=Confidence.MEDIUM,
        ranks=ranks,
        summary=f"in pass {one.number} {beyond} samples are drawn once more than needed, and as many by no rank",
        evidence=(_count_words(one),),
        fix="let one order decide for all ranks: the same seed on all, each rank its own part; or DistributedSampler",
    )


def _see_order(ruling: Ruling, drawn: Drawn, told: Sequence[Told]) -> Ruling:
    """Find a sampler that says it shuffles, and gives the same order although ``set_epoch`` was called."""
    if ruling.findings or not drawn.set_epoch or ruling.skipped:
        return ruling
    loaders = [one.loader for one in told if one.loader is not None]
    if not all(len(one.epochs) > 1 and len({epoch.order for epoch in one.epochs}) == 1 for one in loaders):
        return ruling
    rule = rule_of(check_epochs)
    ranks = tuple(one.rank for one in told)
    return Ruling(
        findings=(
            Finding(
                code=rule.code,
                kind=rule.kind,
                severity=rule.severity,
                confidence=Confidence.HIGH,
                ranks=ranks,
                summary=f"{rank_list(ranks)} draw in the same order in each pass, although set_epoch was called",
                evidence=(f"sampler {drawn.sampler}: it says that it shuffles",),
                fix="make the sampler's shuffle depend on its epoch, as a generator seeded with seed + epoch",
            ),
        )
    )


def _as_error(ruling: Ruling) -> Ruling:
    """Take for an error what the rule calls one once a job hangs: a loop over this loader will."""
    return replace(ruling, findings=tuple(replace(one, severity=Severity.ERROR) for one in ruling.findings))


def _ask_arithmetic(drawn: Drawn, accumulation: int) -> Iterator[tuple[Rule, tuple[Problem, ...], Check]]:
    shares = _shares(drawn, accumulation)
    for check in OF_ARITHMETIC if shares is not None else ():
        rule = rule_of(check)
        answer = check(shares)
        yield rule, answer.problems, outcome(rule, answer, GROUP)


def _shares(drawn: Drawn, accumulation: int) -> Shares | None:
    """Return the first pass as the arithmetic has it; None where it was not whole."""
    if drawn.batch_size is None or not drawn.passes or not all(row.complete for row in drawn.passes[0].ranks):
        return None
    rows = drawn.passes[0].ranks
    plan = Plan(
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
