"""DD501, DD502, DD505 and DD506: parameters, buffers, optimizers and models differ between ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import first_names, grouped, majority_of, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.consistency import replicas as drift
from ddpdoctor.rules.consistency.gradients import added_after_wrapping, why_gradients_differ
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.calls import find_difference
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.progress.states import places
from ddpdoctor.rules.progress.waits import group_table, group_words
from ddpdoctor.rules.registry import also, rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.model.consistency import Values
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.answers import Answer
    from ddpdoctor.rules.progress.calls import ModelDifference


MAX_SETTINGS = 3  # How many settings that differ are shown with their values. Our choice.
SAME_SETTINGS = (
    "use the same optimizer settings on all ranks; step the scheduler on all ranks, and give a scheduler that uses the "
    "loss (ReduceLROnPlateau) the mean over all ranks"
)
_LBFGS = "LBFGS"
UNEVEN_STEPS = "steps"  # name of the cause that ranks made different numbers of steps
_UNSEEN = ", or gradients were changed after the reduction in a step that was not compared"
_SEE_EACH = "; --check-every 1 shows the exact step, and whether gradients differ in it"
_LOAD_DDP = "load the checkpoint before you wrap the model in DDP, or on all ranks"
_LOAD_MESH = "initialize and load on all ranks, as torch.distributed.checkpoint does"
# Settings that choose how a step is computed, not what: they change the last bits at most.
_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_DECAY = "weight_decay"
_DECOUPLED = frozenset({"AdamW"})  # optimizers whose weight decay does not go through their state


def why_parameters_differ(sighting: drift.Sighting) -> drift.DriftCause:
    for cause in chain(_reduction_causes(sighting), _optimizer_causes(sighting)):
        return cause
    never = "" if sighting.last_good is not None else "; or they were never equal (init_sync=False)"
    splits = sighting.difference.splits
    blame = drift.blame_of(splits)
    several = "one rank" if len(splits[0].sides) == 2 else "several ranks"
    writers = rank_list(blame.ranks) if blame.is_known else several
    unseen, see_each = _of_unseen_steps(sighting)
    return drift.DriftCause(
        name="written",
        words=f"something other than the optimizer step changed them on {writers}, such as a checkpoint "
        f"loaded only there or an in-place edit{unseen}{never}",
        fix=f"{_LOAD_MESH if sighting.replica.mesh_dims else _LOAD_DDP}; change parameters the same way on all ranks, "
        f"or broadcast them afterwards{see_each}",
    )


def _reduction_causes(sighting: drift.Sighting) -> Iterator[drift.DriftCause]:
    before_it = (other for other in drift.sightings(sighting.replica, What.GRADIENT) if other.step <= sighting.step)
    earlier = next((other for other in before_it if drift.is_aligned(other.values)), None)
    if earlier is not None:
        cause = why_gradients_differ(earlier)
        blame = cause.blame or drift.blame_of(earlier.difference.splits)
        yield replace(cause, words=f"the gradients differ since step {earlier.step}: {cause.words}", blame=blame)
    uneven = drift.disagreement({each.rank: each.steps for each in sighting.values}, lambda steps: f"{steps} steps")
    if uneven is not None:
        words = f"the ranks took different numbers of steps: {uneven[0]}"
        fix = (
            "call optimizer.step() equally often on all ranks: do not branch on the rank, the local loss or the "
            "local batch"
        )
        yield drift.DriftCause(name=UNEVEN_STEPS, words=words, fix=fix, blame=uneven[1], at_the_step=True)
    now, before = next(iter(sighting.values), None), next(iter(sighting.before), None)
    if now is None or sighting.stream.clock is not StreamClock.STEP:
        return
    steps = now.steps - (before.steps if before else 0)
    missing = steps - (now.reductions - (before.reductions if before else 0))
    # Fewer backwards were reduced than steps made, and that was not already true earlier.
    if missing > 0 and (before is None or before.reductions >= before.steps):
        outside = "run the last batch before step() outside no_sync(), also when an epoch ends during an accumulation"
        yield drift.DriftCause(
            name="steps without a reduction",
            words=f"{missing} of the last {steps} steps had no gradient reduction",
            fix=f"call the DDP object itself in every training step, and {outside}",
            blame=drift.seen(sighting.values),
            unsynchronized=True,
            at_the_step=True,
        )


def _optimizer_causes(sighting: drift.Sighting) -> Iterator[drift.DriftCause]:
    values = sighting.values
    if not any(each.settings for each in values):  # a comparison that recorded no optimizer: take the last steps
        by_step = (stream for stream in sighting.replica.streams if stream.clock is StreamClock.STEP)
        values = next(filter(None, (drift.values_at(stream, stream.last_number) for stream in by_step)), ())
    if different := _different_settings(values, kernels=True):
        texts, blame = different
        words = f"the optimizer has different settings: {texts}"
        yield drift.DriftCause(name="settings", words=words, fix=SAME_SETTINGS, blame=blame, at_the_step=True)
    yield from filter(None, [added_after_wrapping(sighting)])
    if any(_LBFGS in each.optimizer for each in sighting.values):
        words = "LBFGS uses the loss that its closure returns, and that loss differs between ranks"
        fix = "return the mean loss over all ranks (all_reduce) from the closure"
        yield drift.DriftCause(name="line search", words=words, fix=fix, at_the_step=True)
    state = next((seen for seen in drift.sightings(sighting.replica, What.STATE) if seen.step <= sighting.step), None)
    if state is not None and not state_follows_parameters(sighting.values):
        unseen, see_each = _of_unseen_steps(state)
        words = f"the optimizer state differs since step {state.step}, with equal gradients{unseen}"
        fix = f"load the optimizer state on all ranks from the same file{see_each}"
        yield drift.DriftCause(
            name="optimizer state", words=words, fix=fix, blame=drift.blame_of(state.difference.splits)
        )


def _of_unseen_steps(sighting: drift.Sighting) -> tuple[str, str]:
    # The gradients of such a step are gone: only parameters and state show what they did.
    return (_UNSEEN, _SEE_EACH) if sighting.step - (sighting.last_good or 0) > 1 else ("", "")


def _different_settings(values: Sequence[Values], *, kernels: bool = False) -> tuple[str, drift.DriftBlame] | None:
    """Return "lr is 0.1 on ranks 0 and 1, 0.01 on rank 2", and the ranks to blame, or None if no setting differs."""
    # ``kernels`` includes the settings that only choose a kernel.
    known = [each for each in values if each.settings]
    names = dict.fromkeys(name for each in known for name, _ in each.settings)
    found = []
    for name in names:
        if name.rpartition(".")[2] in _KERNELS and not kernels:  # "lr" of "1.lr", which is that of a group
            continue
        apart = drift.disagreement({each.rank: dict(each.settings).get(name, "not set") for each in known})
        found += [(f"{name} is {apart[0]}", apart[1])] if apart is not None else []
    return ("; ".join(words for words, _ in found[:MAX_SETTINGS]), found[0][1]) if found else None


def state_follows_parameters(values: Sequence[Values]) -> bool:
    return any(
        each.optimizer.rpartition(".")[2] not in _DECOUPLED
        # As text, "0" or "0.0" if it is off.
        and any(name.rpartition(".")[2] == _DECAY and text.strip("-0.") for name, text in each.settings)
        for each in values
    )


# Steps with equal gradients on all ranks, before we assume that the script exchanges them. Our choice: one may be
# chance, for example if all gradients are zero.
MIN_EXCHANGED = 2
BROADCAST = (
    "wrap the model in DistributedDataParallel, or broadcast rank 0's parameters once before training: `for p in "
    "model.parameters(): dist.broadcast(p.data, src=0)`"
)


@rule("DD501", "param-drift", Severity.ERROR, "Parameters differ between ranks", after=("grad-drift",))
def check_parameters(job: Job) -> Answer:
    """Report parameters that differ between ranks that should hold the same values."""
    seen = drift.survey(job, What.PARAMETER, why_parameters_differ)
    found = [_since(difference) for difference in seen.found]
    for replica in drift.replicas_of(job, wrapped=False):
        sighting = next(iter(drift.sightings(replica, What.PARAMETER)), None)
        cause = _why_unwrapped_differs(replica, sighting) if sighting is not None else None
        if sighting is not None and cause is not None:
            found.append(drift.FoundDifference(sighting=sighting, cause=cause, since=None if sighting.step else 1))
    return drift.ruling(job, seen, drift.problems_of(job, found, "parameters"), "parameters")


def _since(found: drift.FoundDifference) -> drift.FoundDifference:
    # Such ranks are compared at the end only, after equally many backwards.
    sighting = found.sighting
    if found.cause.name != UNEVEN_STEPS or sighting.stream.clock is not StreamClock.END:
        return found
    if any(values.steps == 0 for values in sighting.values):
        return replace(found, since=1)
    first = next(
        (seen.step for seen in drift.sightings(sighting.replica, What.PARAMETER) if not drift.is_aligned(seen.values)),
        None,
    )
    return replace(found, since=first)


def _why_unwrapped_differs(replica: drift.ReplicaStreams, sighting: drift.Sighting) -> drift.DriftCause | None:
    """Return why a model that should be equal differs, or None if each rank may have its own by design."""
    stream, never_equal = sighting.stream, sighting.last_good is None
    differs = any(difference.what is What.GRADIENT for difference in stream.differences)
    stood_still = stream.unchanged >= stream.compared - 1
    if What.GRADIENT in stream.kinds and not differs and not stood_still and stream.compared > MIN_EXCHANGED:
        if not never_equal:
            return why_parameters_differ(sighting)
        words = (
            "the gradients are equal on all ranks, but the parameters never were: each rank created its own "
            "initial weights (another seed), and no rank broadcast them"
        )
        evidence = (
            f"the model is not wrapped in DDP on its {len(replica.members)} ranks; all ranks used equal gradients",
        )
        return drift.DriftCause(
            name="never sent", words=words, fix=BROADCAST, blame=drift.seen(sighting.values), evidence=evidence
        )
    last = next((values for number, values in stream.values if number == stream.last_number), None)
    if last is None or not all(each.own_steps > 0 and each.through > 0 for each in last):
        return None
    since = "from the start" if never_equal else "since their first gradients, which were not averaged"
    return drift.DriftCause(
        name="unwrapped",
        words=f"this model is not wrapped in DDP, and its gradients are not reduced, so the ranks differ {since}; the "
        "DDP model trains through it and gets the mean of gradients from different models",
        fix="wrap it in DistributedDataParallel too, one object per model; if each rank should have its own, pass "
        "--allow-different with its name",
        evidence=("it has its own loss, and backwards that reach the DDP model pass through it",),
    )


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of BatchNorm
# Parts of the names of tensors that ranks may have for themselves; so they may have numbers and flags. Our choice.
_OWN = ("rank", "seed", "rng", "expert", "shard", "local", "offset")
# Names of memory that is written before it is read, such as a cache for generation, which training does not use.
_SCRATCH = re.compile(r"(^|[._])(k|v|kv|key|value)_?cache|cache_?(k|v|kv)s?$|scratch|workspace", re.IGNORECASE)
_BY_DESIGN = "constant tensors differ between ranks of a mesh, but each rank may have its own by design"


@rule("DD502", "buffer-drift", Severity.WARNING, "Buffers differ between ranks")
def check_buffers(job: Job) -> Answer:
    """Report buffers that differ between ranks after DDP sent them, or because DDP is set not to send them."""
    seen = drift.survey(job, What.BUFFER, _why)
    found = [difference for difference in seen.found if not difference.sighting.replica.mesh_dims]
    differing = [difference for difference in seen.found if difference.sighting.replica.mesh_dims]
    constants = [constant for each in differing if (constant := _constants(each)) is not None]
    if differing and not constants and not found:
        return skipped("; ".join((*seen.excuses, _BY_DESIGN)))
    problems = drift.problems_of(job, found, "buffers") + drift.problems_of(job, constants, "constant tensors")
    return drift.ruling(job, seen, problems, "buffers that DDP sends")


def _constants(found: drift.FoundDifference) -> drift.FoundDifference | None:
    """Return a difference with only those constants that should be equal, or None without any."""
    sighting, all_splits = found.sighting, found.sighting.difference.splits
    splits = [split for split in all_splits if not _SCRATCH.search(split.row.name)]
    unwritten = {(each.rank, name) for each in sighting.values for name in each.unwritten}
    empty_on = {}  # the ranks on which a tensor is as ``to_empty`` made it
    for split in splits:
        name = re.sub(r"\d+", "*", split.row.name)[:120]
        empty_on[split] = [rank for side in split.sides for rank in side if (rank, name) in unwritten]
    kept = [split for split in splits if empty_on[split]]
    ranks = tuple(sorted({rank for split in kept for rank in empty_on[split]}))
    members = {rank for split in kept for side in split.sides for rank in side}
    blame = drift.DriftBlame(ranks=ranks) if len(ranks) < len(members) else drift.blame_of(kept)
    if not kept:
        numbers = [split for split in splits if split.row.shape in {(), (1,)} and "float" not in split.row.dtype]
        own = [split for split in splits if any(word in split.row.name.lower() for word in _OWN)]
        kept = [split for split in splits if majority_of(split.sides) and split not in numbers + own]
        blame = drift.blame_of(kept)
        members = {rank for split in kept for side in split.sides for rank in side}
        if blame.ranks == (min(members, default=0),):
            blame = drift.DriftBlame(ranks=tuple(sorted(members)), is_known=False)
    if not kept:
        return None
    difference = sighting.difference
    left = difference.differing - len(all_splits) + len(kept)
    names = first_names(list(dict.fromkeys(split.row.name for split in kept)), count=left)
    if ranks:
        words = "after to_empty(), which leaves memory uninitialized, no write was seen to "
        words += f"{names} on {rank_list(ranks)}"
    else:
        words = f"no wrapper of the model makes {names} equal, so ranks have initialized or loaded them differently"
    fix = (
        "after to_empty(), give every buffer its value on all ranks (reset_parameters(), or the code that computed it; "
        "non-persistent ones are not in checkpoints), load with strict=True, or broadcast it from a correct rank; "
        f"if ranks should have their own, pass --allow-different '{kept[0].row.name}'"
    )
    return replace(
        found,
        sighting=replace(sighting, difference=replace(difference, splits=tuple(kept), differing=left)),
        cause=drift.DriftCause(name="uninitialized" if ranks else "set apart", words=words, fix=fix, blame=blame),
    )


def _why(sighting: drift.Sighting) -> drift.DriftCause:
    if sighting.stream.clock is StreamClock.SYNC:
        return drift.DriftCause(
            name="not sent",
            words="DDP broadcast rank 0's buffers without these: they were replaced or registered after wrapping",
            fix="register buffers before you wrap the model, and change them in place (copy_) instead of assigning "
            "new ones",
        )
    names = {split.row.name.rpartition(".")[2] for split in sighting.difference.splits}
    what = "its own running statistics" if names & set(_STATISTICS) else "its own values"
    fix = "keep broadcast_buffers=True, or use SyncBatchNorm; if this is intended, pass --allow-different '*running_*'"
    return drift.DriftCause(name="kept apart", words=f"with broadcast_buffers=False, each rank keeps {what}", fix=fix)


FOLLOWS = "follows"  # name of the cause that state differs because gradients or parameters differed earlier


@rule(
    "DD505",
    "optimizer-drift",
    Severity.ERROR,
    "Optimizer state or settings differ between ranks",
    after=("param-drift",),
)
def check_optimizers(job: Job) -> Answer:
    """Report optimizers whose state or settings differ between ranks, even if the parameters are still equal."""
    seen = drift.survey(job, What.STATE, _why_state_differs)
    counted = [found for found in seen.found if found.cause.name != FOLLOWS]
    settings = [found for replica in drift.replicas_of(job) if (found := _first_settings(job, replica)) is not None]
    settings.sort(key=lambda found: found.step or 0)
    findings = [*settings[:1], *drift.problems_of(job, counted, "optimizer states")]
    if not findings and seen.found:
        return skipped(seen.found[0].cause.words)
    compared = seen.compared or any(
        values.settings and not drift.excuse_of_model(replica, What.PARAMETER)
        for replica in drift.replicas_of(job)
        for values in drift.all_values(stream for stream in replica.streams if stream.compared)
    )
    return drift.ruling(job, replace(seen, compared=compared), findings, "optimizers")


def _why_state_differs(sighting: drift.Sighting) -> drift.DriftCause:
    for what, code in ((What.GRADIENT, "DD503"), (What.PARAMETER, "DD501")):
        earlier = next((seen for seen in drift.sightings(sighting.replica, what) if seen.step <= sighting.step), None)
        if earlier is not None and (
            what is What.GRADIENT
            or (why_parameters_differ(earlier).unsynchronized or state_follows_parameters(sighting.values))
        ):
            return drift.DriftCause(name=FOLLOWS, words=f"this follows from an earlier difference: see {code}", fix="")
    unseen, see_each = _of_unseen_steps(sighting)
    words = f"with equal gradients, so it was loaded or changed on some ranks only{unseen}: parameters will diverge too"
    fix = f"load the optimizer state on all ranks from the same file{see_each}"
    return drift.DriftCause(name="state", words=words, fix=fix)


def _first_settings(job: Job, replica: drift.ReplicaStreams) -> Problem | None:
    if drift.excuse_of_model(replica, What.PARAMETER):
        return None
    streams = [stream for stream in replica.streams if stream.clock is StreamClock.STEP]
    last_good = None
    for step, values in sorted((at for stream in streams for at in stream.values), key=lambda at: at[0]):
        if any(each.join for each in values) or not drift.is_aligned(values):
            continue
        different = _different_settings(values)
        if different is None:
            last_good = step
            continue
        texts, blame = different
        return Problem(
            confidence=blame.confidence,
            ranks=blame.ranks,
            hosts=drift.hosts_of(job, blame.ranks),
            step=step,
            summary=f"the settings of {values[0].optimizer or 'the optimizer'} differ between "
            f"{rank_list(replica.members)} at step {step}: {texts}",
            evidence=(
                *([f"equal at step {last_good}"] if last_good is not None else []),
                *blame.doubt,
                *drift.model_words(job, replica),
            ),
            fix=SAME_SETTINGS,
        )
    return None


@rule("DD506", "model-differs", Severity.ERROR, "Ranks of one group passed different models to DDP")
def check_models(job: JobState) -> Answer:
    """Report a model that differs between the ranks that DDP keeps equal: in parameters, buffers or their order."""
    difference = job.difference
    if difference is None:
        return passed()
    certain = job.cause is Cause.MODEL and job.stands_still(())
    more = [*say.cascade_words(job.failures, ()), *say.others(job, [failure.rank.rank for failure in job.failures])]
    hosts = say.hosts_of(job, difference.blamed)
    return judged([models_problem(difference, job.world, hosts, more)], certain=certain)


@also("DD506")
def check_built_models(job: Job) -> Answer:
    """Compare the models that ranks built, whether or not they reached DDP's constructor."""
    world = len(job.ranks)
    difference = find_difference(job.ranks, group_table(job), world)
    if difference is None:
        return passed()
    hosts = {rank.host for rank in job.ranks}
    blamed = tuple(dict.fromkeys(rank.host for rank in job.ranks if rank.rank in difference.blamed))
    return judged([models_problem(difference, world, blamed if len(hosts) > 1 else ())])


def models_problem(
    difference: ModelDifference, world: int, hosts: tuple[str, ...], more: Iterable[str] = ()
) -> Problem:
    blamed = difference.blamed
    sites = {n: difference.models[n].site for n in blamed}
    have = _have({n: f"{model.count} parameters and buffers" for n, model in sorted(difference.models.items())})
    return Problem(
        confidence=Confidence.HIGH if len(blamed) < len(difference.models) else Confidence.MEDIUM,
        ranks=blamed,
        hosts=hosts,
        where=tuple(place for n, site in sites.items() for place in places(n, [site])),
        tensor=difference.tensor,
        summary=_summary(difference),
        evidence=(
            f"DDP model {difference.number} in {group_words(difference.group, world)}",
            *(have if len(have) > 1 else []),
            *more,
        ),
        fix="build the model with the same arguments in the same order on all ranks",
    )


def _summary(difference: ModelDifference) -> str:
    blamed = difference.blamed
    if difference.tensor is None:
        return f"{rank_list(blamed)} passed a different model to DDP than the others"
    rest = [n for n in sorted(difference.models) if n not in set(blamed)]
    sides = []
    for numbers in (blamed, rest):
        words = dict.fromkeys(numbers, "no such tensor")
        for number in numbers:
            tensor = difference.rows[number]
            if tensor is not None:
                shape = "no shape yet" if tensor.shape is None else f"{tensor.dtype}{list(tensor.shape)}"
                kind = "buffer" if tensor.is_buffer else f"requires_grad={tensor.requires_grad}"
                words[number] = f"{tensor.name} of {shape}, {kind}"
        sides.append(", ".join(_have(words)))
    return f"the ranks' DDP models differ at {difference.tensor}: {', but '.join(filter(None, sides))}"


def _have(what: Mapping[int, str]) -> list[str]:
    sides = list(grouped((words, number) for number, words in what.items()).items())[: say.MAX_CLASSES]
    return [f"{rank_list(ranks)} {verb(ranks, 'has', 'have')} {words}" for words, ranks in sides]
