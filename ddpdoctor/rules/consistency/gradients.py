"""DD503, DD504, DD507, DD508 and DD511: gradients, random numbers, and what the optimizer trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import Origin, StreamClock, What
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import first_names, grouped, rank_list
from ddpdoctor.rules.answers import Answer, Problem, found, judged, passed, skipped
from ddpdoctor.rules.consistency import replicas as drift
from ddpdoctor.rules.progress.states import to_place
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.consistency import NonFinite, Stream, Values
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.answers import Answer


MAX_NAMES = 3  # How many parameters a sentence names. Our choice.
# Parts of the names of torch's own hooks that leave the same gradients on all ranks.
_REDUCING_HOOKS = ("allreduce", "compress", "powersgd", "quantization")


@rule(
    "DD503",
    "grad-drift",
    Severity.ERROR,
    "The optimizers of the ranks got different gradients",
    after=("nonfinite-grad",),
)
def check_gradients(job: Job) -> Answer:
    """Report gradients that differ between ranks right before an optimizer's step."""
    seen = drift.survey(job, What.GRADIENT, why_gradients_differ)
    return drift.ruling(job, seen, drift.problems_of(job, seen.found, "gradients"), "gradients")


def why_gradients_differ(sighting: drift.Sighting) -> drift.DriftCause:
    blame = drift.blame_of(sighting.difference.splits)
    known = blame.is_known
    who = f"{rank_list(blame.ranks)} changed them" if known else "they were changed"
    if sighting.replica.mesh_dims:
        return drift.DriftCause(
            name="apart in a mesh",
            words=f"ranks along the {sighting.replica.mesh_dims} dimension of the mesh have equal copies of these "
            f"parameters, but {who} before the optimizer, or computed them from other inputs",
            fix="give the ranks of one tensor parallel group the same batch and random state, and do the same work "
            "between backward and step() on all ranks",
            at_the_step=True,
        )
    for cause in chain(_without_reduction(sighting), _after_reduction(sighting)):
        return cause
    more = "" if known else ", or added to by a second backward, such as that of a reentrant checkpoint"
    return drift.DriftCause(
        name="changed after the reduction",
        words=f"{who} after DDP had reduced them (edited, or clipped or scaled by a value that differs between "
        f"ranks{more})",
        fix="do the same between backward and step() on all ranks: clip by the norm of the reduced gradients, scale by "
        "a common value, and avoid branches on the rank; checkpoint with use_reentrant=False",
        at_the_step=True,
    )


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (" and more" if len(names) > MAX_NAMES else "")


def added_after_wrapping(sighting: drift.Sighting) -> drift.DriftCause | None:
    """Return the cause if DDP was never given the tensors that differ, and no majority agrees on one before them."""
    # DDP may wait for a parameter that was replaced, and then it reduces none of that bucket.
    names = list(dict.fromkeys(name for each in sighting.values for name in each.unreduced))
    splits = sighting.difference.splits
    blame = drift.seen(each for each in sighting.values if each.unreduced)
    differs = [split.row.name in names for split in splits]
    if blame is None or not any(differs) or (not differs[0] and drift.blame_of(splits[:1]).is_known):
        return None
    named = _first_few(names)
    return drift.DriftCause(
        name="added after wrapping",
        words=f"DDP does not reduce {named}: added, replaced or unfrozen after wrapping",
        fix="wrap the model in DDP after you add all parameters and set requires_grad; if you add, replace or unfreeze "
        "parameters later, wrap the model and create the optimizer again",
        blame=blame,
        evidence=(f"parameters unknown to DDP on {rank_list(blame.ranks)}: {named}",),
    )


def _without_reduction(sighting: drift.Sighting) -> Iterator[drift.DriftCause]:
    # Without a forward, and with fewer reductions than steps since the last equal state, or since the start.
    counts = {each.rank: (each.reductions, each.steps) for each in sighting.before}
    bypassed = []
    for each in sighting.values:
        reductions, steps = counts.get(each.rank, (0, 0))
        reduced = each.reductions - reductions >= each.steps - steps > 0
        bypassed += [each] if each.forwards == 0 and not reduced else []
    blame = drift.seen(bypassed)
    unreduced = partial(drift.DriftCause, unsynchronized=True, at_the_step=True)
    if blame is not None:
        words = "the training step bypassed DDP: its forward did not run before the step"
        fix = "call the DDP object itself in training, `model(x)`, not `model.module(x)` or the wrapped module"
        evidence = (f"no DDP forward with gradients since the previous step on {rank_list(blame.ranks)}",)
        yield unreduced(name="bypassed", words=words, fix=fix, blame=blame, evidence=evidence)
    blame = drift.seen(each for each in sighting.values if 0 < each.forwards == each.unreduced_forwards)
    if blame is not None:
        words = "all forwards since the previous step ran under no_sync(), which skips the reduction"
        outside = "run the forward and backward of the last batch before step() outside no_sync()"
        fix = f"{outside}: the forward decides whether gradients are reduced"
        evidence = (f"all DDP forwards since the previous step were under no_sync() on {rank_list(blame.ranks)}",)
        yield unreduced(name="no_sync", words=words, fix=fix, blame=blame, evidence=evidence)
    yield from filter(None, [added_after_wrapping(sighting)])
    blame = drift.seen(each for each in sighting.values if each.unfinished)
    if blame is not None:  # DDP still waited for gradients when the optimizer made its step
        named = _first_few(list(dict.fromkeys(name for each in sighting.values for name in each.unfinished)))
        words = f"backward left {named} without a gradient, so DDP did not finish the reduction"
        fix = (
            "pass find_unused_parameters=True to DistributedDataParallel on all ranks; or use every output of "
            "forward in the loss, and remove or freeze unused parameters before you wrap the model"
        )
        seen = (f"gradients that DDP was waiting for at the step on {rank_list(blame.ranks)}: {named}",)
        yield drift.DriftCause(name="unfinished", words=words, fix=fix, blame=blame, at_the_step=True, evidence=seen)


def _after_reduction(sighting: drift.Sighting) -> Iterator[drift.DriftCause]:
    has_majority = drift.blame_of(sighting.difference.splits).is_known
    hooks = sorted({each.hook for each in sighting.values if each.hook})
    own = [hook for hook in hooks if not any(name in hook.lower() for name in _REDUCING_HOOKS)]
    if own and not has_majority:
        words = f"the communication hook {own[0]} returns different gradients on different ranks"
        fix = "make the hook return the same result on all ranks for each bucket, such as the mean by all_reduce"
        evidence = (f"the script registered the communication hook {', '.join(own)}",)
        yield drift.DriftCause(name="communication hook", words=words, fix=fix, evidence=evidence)
    scales = drift.disagreement({each.rank: each.scale for each in sighting.values if each.scale is not None})
    if scales is not None:
        words = f"the gradient scaler's scale is {scales[0]}"
        fix = (
            "create GradScaler with the same arguments on all ranks, load its state on all ranks, and call "
            "update() on all ranks after each step()"
        )
        yield drift.DriftCause(name="scaled apart", words=words, fix=fix, blame=scales[1], at_the_step=True)
    some = next((each for each in sighting.values if 0 < each.unreduced_forwards < each.forwards), None)
    if some is not None and not has_majority:
        name = "accumulated after the reduction"
        words = "gradients were added under no_sync() or changed after the last reduction"
        fix = "use no_sync() for all accumulated batches but the last one"
        under = f"{some.unreduced_forwards} of {some.forwards} forwards"
        evidence = (f"{under} since the previous step were under no_sync()",)
        yield drift.DriftCause(name=name, words=words, fix=fix, at_the_step=True, evidence=evidence)


NOT_LOOKED = "local gradients were not checked"
MAX_RANKS = 4  # Ranks whose gradients are described one by one. Our choice.
LONG_ROW = 20  # Skipped steps in a row that earn a gradient scaler a warning. Our choice, see the rule's page.
_FIXES = {
    Origin.INPUT: "check this rank's samples in that step, and fix or drop those with inf or NaN",
    Origin.PARAMETER: "check what changed the parameters in the previous step: the learning rate, an overflow in the "
    "reduction (a half-precision communication hook), or loaded weights",
    Origin.LOSS: "look for a logarithm, root or division by zero in the loss and the model, or an overflow in half "
    "precision",
    Origin.GRADIENT: "run that step on this rank with torch.autograd.set_detect_anomaly(True) to find the operation",
}


@rule("DD504", "nonfinite-grad", Severity.ERROR, "A rank had inf or NaN in its own gradients before the reduction")
def check_local_gradients(job: Job) -> Answer:
    """Report the rank that first had inf or NaN in its own gradients, before DDP averaged them with the others."""
    looked = [rank for rank in job.ranks if rank.nonfinite is not None]
    if not looked:
        return skipped(NOT_LOOKED)
    # Groups of different ranks may share a name.
    pairs = ((rank, seen) for rank in looked for seen in rank.nonfinite or ())
    members_of = {(rank.rank, group.name): group.ranks for rank in looked for group in reversed(rank.groups)}
    found = grouped(
        ((members_of.get((rank.rank, seen.group), ()), seen.group, seen.model), (rank, seen)) for rank, seen in pairs
    )
    known, problems = {rank.rank for rank in looked}, []
    for (members, _, _), those in found.items():
        by_step: dict[int, dict[int, NonFinite]] = {}
        for rank, nonfinite in those:
            by_step.setdefault(nonfinite.step, {})[rank.rank] = nonfinite
        group = set(members) or {rank.rank for rank in job.ranks}
        unseen = tuple(sorted(group - known))
        problems.append(
            _nonfinite_problem(
                job,
                [
                    NonFiniteStep(
                        step=step, by_rank=by_rank, others=tuple(sorted((group & known) - set(by_rank))), unseen=unseen
                    )
                    for step, by_rank in sorted(by_step.items())
                ],
            )
        )
    return judged(problems)


def _nonfinite_problem(job: Job, sightings: list[NonFiniteStep]) -> Problem:
    used = [at for at, sighting in enumerate(sightings) if sighting.used]
    if used:
        cause = sightings[used[0]]
        before = sightings[used[0] - 1] if used[0] else None
        # A rank that ended in between never saw that its gradients were used, but the others have NaN in parameters.
        if cause.origins == {Origin.PARAMETER} and before is not None and before.step == cause.step - 1:
            cause = before
        if cause.origins == {Origin.PARAMETER}:
            summary = (
                f"{rank_list(cause.ranks)} had inf or NaN in parameters before the backward of step {cause.step}, but "
                "no earlier local gradient had"
            )
            return _nonfinite_finding(job, cause, Severity.ERROR, summary, Confidence.MEDIUM)
        spread = "the reduction spread it to all ranks" if cause.others or cause.unseen else "the optimizer used it"
        return _nonfinite_finding(job, cause, Severity.ERROR, f"{_computed(cause)}; {spread}")
    scaled = [sighting for sighting in sightings if any(seen.scaled for seen in sighting.by_rank.values())]
    if scaled:
        cause = scaled[0]
        longest = max(seen.in_a_row for seen in cause.by_rank.values())
        summary = f"{_computed(cause)}; the gradient scaler skipped the step, so the batches of all ranks are lost"
        if longest >= LONG_ROW:
            summary = (
                f"the gradient scaler skipped {longest} steps in a row up to step {cause.step}: the gradients of "
                f"{rank_list(cause.ranks)} have inf or NaN at any scale"
            )
        return _nonfinite_finding(job, cause, Severity.WARNING, summary)
    return _nonfinite_finding(job, sightings[0], Severity.INFO, f"{_computed(sightings[0])}; no optimizer used it")


def _nonfinite_finding(
    job: Job, cause: NonFiniteStep, severity: Severity, summary: str, confidence: Confidence = Confidence.HIGH
) -> Problem:
    lines = []
    for rank in cause.ranks[:MAX_RANKS]:
        seen = cause.by_rank[rank]
        names = ", ".join(seen.tensors) + (", ..." if seen.count > len(seen.tensors) else "")
        held, note = "NaN" if seen.is_nan else "inf", f"; {seen.note}" if seen.note else ""
        lines.append(f"rank {rank}: {held} in the gradients of {seen.count} of {seen.of} parameters ({names}){note}")
    if len(cause.ranks) > MAX_RANKS:
        lines.append(f"the same on {len(cause.ranks) - MAX_RANKS} more ranks")
    if cause.others:
        finite = rank_list(cause.others)
        lines.append(f"the gradients of {finite} were finite in step {cause.step}, before the reduction")
    if cause.unseen:
        lines.append(f"the gradients of {rank_list(cause.unseen)} were not checked")
    often = max(seen.times for seen in cause.by_rank.values())
    if not cause.used and often > 1:
        lines.append(f"this happened in {often} backwards so far")
    return Problem(
        severity=severity,
        confidence=confidence,
        summary=summary,
        ranks=cause.ranks,
        hosts=drift.hosts_of(job, cause.ranks),
        where=tuple(
            to_place(rank, seen.where) for rank, seen in sorted(cause.by_rank.items()) if seen.where is not None
        ),
        step=cause.step,
        tensor=next(iter(cause.first.tensors), None),
        evidence=tuple(lines),
        fix=_FIXES[cause.first.origin],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteStep:
    """Ranks whose own gradients of one step of one model were not finite."""

    step: int
    by_rank: dict[int, NonFinite]
    others: tuple[int, ...]  # ranks of the same group whose gradients were checked and were finite in this step
    unseen: tuple[int, ...]  # ranks of the group whose gradients were not checked

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.by_rank))

    @property
    def first(self) -> NonFinite:
        return self.by_rank[min(self.by_rank)]

    @property
    def used(self) -> bool:
        return any(seen.used for seen in self.by_rank.values())

    @property
    def origins(self) -> set[Origin]:
        return {seen.origin for seen in self.by_rank.values()}


def _computed(cause: NonFiniteStep) -> str:
    value = "NaN" if any(seen.is_nan for seen in cause.by_rank.values()) else "inf"
    tensor = next(iter(cause.first.tensors), "a parameter")
    if cause.origins == {Origin.GRADIENT}:
        first = "and the loss and the input were finite"
    else:
        names = [origin.value for origin in Origin if origin in cause.origins and origin is not Origin.GRADIENT]
        first = f"and its {' or '.join(names)} was not finite before"
    return f"{rank_list(cause.ranks)} computed {value} as the gradient of {tensor} in step {cause.step}, {first}"


# Comparisons in a row without any change. Our choice: a step may be skipped, or have a learning rate of 0 in a warm-up.
MIN_UNCHANGED = 2
# Steps to check before a part of the model is called stale. Our choice: a second optimizer may start stepping later.
MIN_COMPARED = 3
FOREIGN_TENSORS = "the model's parameters have gradients, and the optimizer's tensors never had one"
MAKE_ANEW = "create the optimizer from model.parameters() after you move, replace, load and wrap the model"


@rule("DD508", "stale-optimizer", Severity.ERROR, "The optimizer has tensors that are not parameters of the model")
def check_stale_optimizer(job: Job) -> Answer:
    """Report parameters that never change while optimizers step with tensors that are not the model's own."""
    streams = [(replica, stream) for replica in drift.replicas_of(job) for stream in replica.streams]
    found = []
    for replica, stream in streams:
        values = drift.values_at(stream, stream.last_number)
        if stream.last_number is None or not values:
            continue
        last = drift.step_of(stream, stream.last_number)
        stale = _whole_model(job, stream, values, last)
        if stale is None and stream.clock is StreamClock.STEP:
            stale = next(_stale_parts(stream, values, last), None)
        if stale is not None:
            ranks, evidence = tuple(each.rank for each in values), (*stale.evidence, *drift.model_words(job, replica))
            found.append(replace(stale, ranks=ranks, hosts=drift.hosts_of(job, ranks), evidence=evidence))
    if found:
        return judged([min(found, key=lambda problem: (problem.severity or Severity.ERROR).order)])
    followed = any(stream.compared > MIN_UNCHANGED and What.PARAMETER in stream.kinds for _, stream in streams)
    return passed() if followed else skipped(drift.why_nothing(job, "parameters of enough comparisons"))


def _whole_model(job: Job, stream: Stream, values: tuple[Values, ...], last: int) -> Problem | None:
    if stream.unchanged < MIN_UNCHANGED or What.PARAMETER not in stream.kinds:
        return None
    stepped = all(rank.steps > 0 for rank in job.ranks if rank.rank in stream.ranks)
    if not stepped or not all(each.reductions > 0 and each.stray >= each.unheld > 0 for each in values):
        return None
    some = values[0]
    return Problem(
        step=1 if stream.unchanged == stream.compared - 1 else None,
        summary=f"the model's parameters did not change in {some.reductions} backwards on {rank_list(stream.ranks)}: "
        f"the optimizer has {some.stray} tensors that are not in the model, and none of the {some.unheld} "
        "trained parameters",
        evidence=(f"no parameter changed in the last {stream.unchanged + 1} comparisons, up to step {last}",),
        fix=MAKE_ANEW,
    )


def _stale_parts(stream: Stream, values: tuple[Values, ...], last: int) -> Iterator[Problem]:
    """Yield the parts of the model that no optimizer has: replaced, added late, or left out."""
    some, ranks = values[0], rank_list(stream.ranks)
    if stream.compared >= MIN_COMPARED and all(each.reductions > 0 and each.replaced for each in values):
        yield Problem(
            tensor=some.replaced[0],
            summary=f"no optimizer has {', '.join(some.replaced)} on {ranks}; one has tensors of the same shapes that "
            "are not in the model, for example from a layer that was replaced after the optimizer was created",
            evidence=(f"up to step {last}, {FOREIGN_TENSORS}",),
            fix=MAKE_ANEW,
        )
    if all(each.late and each.untrained for each in values):
        yield Problem(
            tensor=some.untrained[0],
            summary=f"no optimizer has {first_names(some.untrained, some.late, count=some.late)} on {ranks}: added or "
            "replaced in the model after the optimizer was created",
            evidence=(f"up to step {last}, they got gradients and did not change",),
            fix=f"{MAKE_ANEW}; or add the new parameters: optimizer.add_param_group({{'params': ...}})",
        )
    if all(each.untrained for each in values):
        names = first_names(some.untrained, some.untrained_count, count=some.untrained_count)
        yield Problem(
            tensor=some.untrained[0],
            severity=Severity.INFO,
            confidence=Confidence.LOW,
            summary=f"no optimizer has {names} on {ranks}: their gradients are computed and reduced, but never used",
            evidence=(f"this is true up to step {last}; layers left out of the optimizer on purpose look the same",),
            fix="to train them, pass them to the optimizer: layers that were frozen when it was created are easily "
            "forgotten; otherwise call requires_grad_(False) before wrapping to save their backward and reduction",
        )


MIN_COMPARISONS = 2  # our choice: ranks that shared a seed only at the start have soon drawn different numbers


@rule("DD507", "same-random", Severity.INFO, "All ranks use the same dropout masks")
def check_random_state(job: Job) -> Answer:
    """Note that all ranks have the same random state at all times while the model trains with dropout."""
    drops_out = [
        (replica, stream)
        for replica in drift.replicas_of(job)
        for stream in replica.streams
        if stream.compared >= MIN_COMPARISONS and any(values.dropout for values in drift.all_values([stream]))
    ]
    if not drops_out:
        return skipped(drift.why_nothing(job, "models that train with dropout"))
    same = next((pair for pair in drops_out if pair[1].compared == pair[1].same_random), None)
    if same is None:
        return passed()
    replica, stream = same
    have = f"{rank_list(stream.ranks)} have the same random state while the model trains with dropout"
    equal = f"the random state was equal on all of them in {stream.compared} comparisons"
    evidence = (equal, *drift.model_words(job, replica))
    fix = "seed each rank differently after you wrap the model: torch.manual_seed(seed + rank)"
    summary = f"{have}, so they use the same dropout masks"
    return found(summary, ranks=stream.ranks, evidence=evidence, fix=fix)


MIN_STEPS = 10  # our choice: a script may well take a few steps before it creates the process group


@rule("DD511", "not-distributed", Severity.WARNING, "Each rank trains its own model")
def check_distributed(job: Job) -> Answer:
    """Report ranks of one launch that train without a process group, so that no gradient is averaged."""
    if (job.world_size or 1) < 2 or len(job.ranks) != job.world_size or not all(rank.recorded for rank in job.ranks):
        return skipped("a single rank, or not all ranks were recorded")
    if any(rank.init_ns is not None or rank.initialized for rank in job.ranks):
        return passed("init_process_group was called")
    steps = min(rank.steps for rank in job.ranks)
    if steps < MIN_STEPS:
        return skipped(f"the ranks took fewer than {MIN_STEPS} optimizer steps")
    ranks = tuple(rank.rank for rank in job.ranks)
    evidence = (f"each took at least {steps} optimizer steps", "none called init_process_group")
    fix = "call init_process_group and wrap the model in DistributedDataParallel; for one process, start one rank"
    summary = f"{rank_list(ranks)} train separate models: no process group connects them"
    return found(summary, ranks=ranks, evidence=evidence, fix=fix)
