"""DD509, DD510, and DD501, DD502 and DD505 for files: replicas against one process, a second run, or other files."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.saved import MODEL_KEYS, Kind
from ddpdoctor.model.words import count_of, first_names, name_list, outvoted, rank_list
from ddpdoctor.rules.answers import Answer, Problem, found, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import also, rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.saved import DiffFacts, Unequal
    from ddpdoctor.model.trial import GradientErrors, OneProcess, ReferenceStep, Trial


_RANDOM = (
    "the model draws random numbers in training outside dropout layers, which were disabled: one process draws "
    "different numbers than the ranks"
)


@rule("DD509", "reference-gradient", Severity.ERROR, "DDP's gradient differs from one process on the whole batch")
def check_reference(trial: Trial) -> Answer:
    """Report gradients that differ from those of one process on the same global batch by more than rounding."""
    reference = trial.reference
    if reference is None:
        return skipped("--reference was not given")
    for step in reference.steps:
        if not all(math.isfinite(tensor.whole) for tensor in step.tensors):
            return unknown(f"the gradients of step {step.step} have inf or NaN")
        if step.random_error > LIMIT:
            return unknown(_RANDOM)
        if step.missing or any(ratio(tensor.whole, tensor.rounding) > LIMIT for tensor in step.tensors):
            return judged([_reference_problem(trial, reference, step)])
    if reference.problem:
        return unknown(reference.problem)
    return passed() if reference.steps else unknown("no step was computed in one process")


def _reference_problem(trial: Trial, reference: OneProcess, step: ReferenceStep) -> Problem:
    cause = explain(reference, step)
    worst = max(step.tensors, key=lambda tensor: ratio(tensor.whole, tensor.rounding), default=None)
    ranks = tuple(participant.rank for participant in trial.participants)
    error_words = []
    if worst is not None:
        wrong = sum(ratio(tensor.whole, tensor.rounding) > LIMIT for tensor in step.tensors)
        how = "float64" if reference.float64 else "another order of the samples"
        wrong_words = f"{wrong} of {len(step.tensors)} gradients differ"
        whole, rounding = (
            f"{error / worst.norm:.2g}" if worst.norm else f"{error:.2g} of a gradient that is 0"
            for error in (worst.whole, worst.rounding)
        )
        error_words = [
            f"{wrong_words} by more than {LIMIT:g} times the rounding error ({how})",
            f"{worst.name}: relative error {whole}; rounding explains {rounding}",
        ]
    off = f"; {count_of(reference.dropout, 'dropout layer')} disabled" if reference.dropout else ""
    return replace(
        cause,
        ranks=ranks,
        hosts=tuple(dict.fromkeys(participant.host for participant in trial.participants)),
        step=step.step,
        tensor=worst.name if worst is not None else (step.missing[0] if step.missing else None),
        summary=f"DDP's gradient differs from one process on the whole batch: {cause.summary}",
        evidence=(
            *error_words,
            *cause.evidence,
            f"the same state and the same batches of {rank_list(ranks)} in one process{off}",
        ),
    )


@rule("DD510", "not-repeatable", Severity.INFO, "Two runs with the same seed differ on the same rank")
def check_repeat(trial: Trial) -> Answer:
    """Report that a second run with the same seed does not give the same bits on the same rank."""
    rerun = trial.rerun
    if rerun is None:
        return skipped("--twice was not given")
    if rerun.step is None:
        return passed()
    since = f"since step {rerun.step}" if rerun.step else "when it is built"
    what, tensor = rerun.name, None
    if rerun.what is not None:
        part, tensor = f" ({rerun.part})" if rerun.part else "", rerun.name
        what = f"the {rerun.what.value} {rerun.name}{part}, {rerun.differing} of {rerun.of} tensors"
    summary = f"a second run with the same seed differs from the first {since}: {what}"
    evidence = (f"on {rank_list(rerun.ranks)}; this is not drift between ranks",)
    fix = "use torch.use_deterministic_algorithms, and draw all random numbers from seeded generators"
    return found(summary, ranks=rerun.ranks, step=rerun.step or None, tensor=tensor, evidence=evidence, fix=fix)


# Our choice: an error of up to this many times the rounding error counts as none. Rounding errors of two computations
# of one gradient differ by small factors; real faults are wrong by a factor of hundreds or more.
LIMIT = 10.0
NEAR = 1e-3  # our choice: how near a factor must be to the world size to be reported as the world size
MAX_NAMES = 4  # How many modules or parameters a sentence names. Our choice.


def ratio(error: float, allowed: float) -> float:
    """Return an error as a multiple of the allowed one; 0 for no error."""
    return error / allowed if error and allowed else math.inf if error else 0.0


def explain(reference: OneProcess, step: ReferenceStep) -> Problem:
    if step.missing:
        return Problem(
            summary=f"{', '.join(step.missing[:MAX_NAMES])} {'has' if len(step.missing) == 1 else 'have'} a gradient "
            "on one side only",
            fix="use the same parameters in forward for every batch and every number of ranks",
        )
    if _agree(step.tensors, "parts"):
        cause = _batchnorm(reference, step) or _weighted(step)
        seen = (
            "DDP's gradient is the mean over the ranks' batches: the reduction is correct, but the loss of the whole "
            "batch is not the mean of the ranks' losses"
        )
    else:
        cause = _not_the_mean(reference, step)
        seen = (
            "DDP's gradient is not the mean over the ranks' batches: check the reduction, a communication hook, and "
            "code that depends on the rank or the world size"
        )
    return cause or Problem(
        summary="the reason is unknown",
        fix="look for code that mixes the samples of a batch (contrastive losses, batch normalization), branches on "
        "the rank, and hooks on gradients",
        confidence=Confidence.MEDIUM,
        evidence=(seen,),
    )


def _agree(tensors: Iterable[GradientErrors], error: str, allowed: str = "rounding") -> bool:
    return all(ratio(getattr(tensor, error), getattr(tensor, allowed)) <= LIMIT for tensor in tensors)


def _not_the_mean(reference: OneProcess, step: ReferenceStep) -> Problem | None:
    if _agree(step.tensors, "local"):
        return Problem(
            summary="it equals the gradient of rank 0's own batch, so gradients were not reduced at all",
            fix="run the forward and backward of the last batch before step() outside no_sync(), and call the model "
            "that is passed to the step, not its .module",
        )
    if _agree(step.tensors, "scaled"):
        return _scaled(reference, step)
    local = [tensor for tensor in step.tensors if ratio(tensor.parts, tensor.rounding) > LIMIT]
    if not 0 < len(local) < len(step.tensors) or not _agree(local, "local"):
        return None
    names = ", ".join(errors.name for errors in local[:MAX_NAMES])
    return Problem(
        summary=f"{len(local)} of {len(step.tensors)} parameters have the gradient of rank 0's own batch, such as "
        f"{names}: they were not reduced",
        fix="train only parameters that DDP knows: wrap the model when it is complete and unfrozen",
    )


def _scaled(reference: OneProcess, step: ReferenceStep) -> Problem:
    world = len(step.samples)
    scale = step.scale
    if abs(scale - world) <= NEAR * world:
        factor = f"{world} times (the world size)"
    elif abs(scale * world - 1) <= NEAR:
        factor = f"1/{world} of (one over the world size)"
    else:
        factor = f"{scale:.6g} times"
    losses = [(loss, part) for loss, part in zip(step.losses, step.part_losses, strict=True) if loss and part]
    if losses and all(math.isclose(loss, scale * part, rel_tol=NEAR) for loss, part in losses):
        why = "the loss is scaled, but DDP already takes the mean"
        summary = f"it is {factor} the mean over ranks, and so is the loss: {why}"
        fix = "return the same loss as in one process: DDP divides by the world size"
        seen = f"the loss of rank 0 is {step.losses[0]:.6g} in DDP, {step.part_losses[0]:.6g} in one process"
        return Problem(summary=summary, fix=fix, evidence=(seen,))
    hooks = reference.hooked[:MAX_NAMES]
    by_hand = f", perhaps by the hooks on {', '.join(hooks)}" if hooks else ""
    return Problem(
        summary=f"it is {factor} the mean over ranks, and the loss is not scaled: the script reduces or scales "
        f"gradients again{by_hand}",
        fix="leave the reduction to DDP: remove any all_reduce of gradients or of the loss before backward",
    )


def _batchnorm(reference: OneProcess, step: ReferenceStep) -> Problem | None:
    known = [tensor for tensor in step.tensors if tensor.without_batchnorm is not None]
    same = all(ratio(errors.without_batchnorm or 0.0, errors.exact) <= LIMIT for errors in known)
    if not reference.batchnorm or not known or not same:
        return None
    return Problem(
        summary=f"BatchNorm uses the statistics of each rank's own batch in {first_names(reference.batchnorm)}",
        fix="on GPUs, call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP; or keep BatchNorm if the "
        "batch per rank is large enough",
        severity=Severity.WARNING,
        evidence=("with the running statistics of BatchNorm, the gradients are equal",),
    )


def _weighted(step: ReferenceStep) -> Problem | None:
    """Return the cause if one process weights the ranks' parts differently than DDP, which weights them equally."""
    if not _agree(step.tensors, "weighted", "exact"):
        return None
    world = len(step.weights)
    if all(abs(weight - 1) <= NEAR for weight in step.weights):
        return Problem(
            summary=f"it is 1/{world} of the expected one: the loss is a sum over samples, and DDP takes the mean over "
            f"{world} ranks",
            fix=f"return the mean over samples, or multiply the sum by the world size ({world})",
        )
    if max(step.weights) - min(step.weights) <= NEAR:
        factor = step.weights[0] * world
        summary = f"one process gets {factor:.4g} times the mean over ranks: the loss is not a mean over samples"
        return Problem(summary=summary, fix="return a loss that is a mean over samples")
    shares = ", ".join(f"{weight:.3g}" for weight in step.weights[:8]) + (", ..." if world > 8 else "")
    uneven = len(set(step.samples)) > 1
    return Problem(
        summary="it is a mean of means: in one process the ranks' parts have different weights, but DDP weights them "
        "equally",
        fix="divide the sum of the loss by the number of samples or tokens of all ranks (all_reduce the count), times "
        "the world size",
        evidence=(
            f"weights of the ranks' parts in one process: {shares}; in DDP {1 / world:.3g} each",
            f"samples by rank: {', '.join(map(str, step.samples[:8]))}"
            if uneven
            else "all ranks have the same number of samples: a mask, padding or class weights change how many count",
        ),
    )


MAX_NAMED = 5  # How many tensors a finding names; the report's data has all. Our choice.
CLOCKS = ("epoch", "step", "iter", "updates")  # names under which trainers save how far training was
PLURALS = {Kind.STATE.value: "tensors of optimizer state", "part of the optimizer": "parts of the optimizer"}
WHO_IS_RIGHT = "it is unknown which file is correct: no content is in more than half of the files"
FILES_FIX = {
    Kind.PARAMETER: "load one file on all ranks before you wrap the model in DDP; `ddpdoctor wrap` on the training "
    "run shows the step and the line where the ranks diverge",
    Kind.BUFFER: "this is expected for BatchNorm between buffer broadcasts; otherwise keep rank 0's file, or use "
    "SyncBatchNorm",
    Kind.STATE: "use the same settings on all ranks, and load the optimizer state on all ranks, not only on rank 0",
}


@also("DD501")
def check_parameter_files(facts: DiffFacts) -> Answer:
    """Report files whose parameters differ."""
    answer = _judge_files(facts, Kind.PARAMETER)
    if facts.incomparable and not answer.problems:
        names = facts.incomparable
        return unknown(f"{len(names)} tensors have a type that cannot be compared, for example {names[0]}")
    return answer


@also("DD502")
def check_buffer_files(facts: DiffFacts) -> Answer:
    """Report files whose buffers differ."""
    return _judge_files(facts, Kind.BUFFER)


@also("DD505")
def check_optimizer_files(facts: DiffFacts) -> Answer:
    """Report files whose optimizers differ, and other values that differ."""
    answer = _judge_files(facts, Kind.STATE, Kind.SETTING)
    unequal = [part for part in facts.unequal if part.kind is Kind.VALUE]
    if not unequal:
        return answer
    summary = f"values other than tensors differ: {', '.join(part.name for part in unequal[:MAX_NAMED])}"
    evidence = tuple(_describe_part(facts, part) for part in unequal[:MAX_NAMED])
    others = Problem(severity=Severity.INFO, summary=summary, evidence=evidence, fix="compare files from the same step")
    return judged([*answer.problems, others])


def _judge_files(facts: DiffFacts, *kinds: Kind) -> Answer:
    unequal = [part for part in facts.unequal if part.kind in kinds]
    if unequal:
        return judged([_problem(facts, unequal, FILES_FIX[kinds[0]])])
    return passed() if facts.tensors else skipped("the files contain no tensors")


def _problem(facts: DiffFacts, unequal: Sequence[Unequal], fix: str) -> Problem:
    blamed = sorted({number for part in unequal for number in outvoted((*part.sides, part.absent_in))})
    # Files that record different epochs or steps need not be equal.
    clocks = [
        part
        for part in facts.unequal
        if part.kind is Kind.VALUE and any(word in part.name.rpartition(".")[2].lower() for word in CLOCKS)
    ]
    other_steps = [
        f"the files may be from different times: {clock.name} is {_values(facts, clock)}" for clock in clocks[:1]
    ]
    has_majority = len(blamed) < len(facts.files)
    settings = all(part.kind is Kind.SETTING for part in unequal)
    noun = unequal[0].kind.value if len({part.kind for part in unequal}) == 1 else "part of the optimizer"
    many = f"{noun} {unequal[0].name}" if len(unequal) == 1 else f"{len(unequal)} {PLURALS.get(noun, noun + 's')}"
    verb = "differs" if len(unequal) == 1 else "differ"
    first = f", {unequal[0].name} first" if len(unequal) > 1 else ""
    values = f": {_values(facts, unequal[0])}" if settings else ""
    between = f"in {_paths(facts, blamed)} from the other files" if has_majority else f"between {_paths(facts, blamed)}"
    # A parameter's own name, without the key under which the file holds the model.
    name = next((part.name for part in unequal if part.kind is not Kind.SETTING), None)
    head, _, rest = (name or "").partition(".")
    prefixes = sorted({prefix for file in facts.files for prefix in file.stripped})
    with_prefix = [number for number, file in enumerate(facts.files) if file.stripped]
    stripped = f"names were compared without the prefix {' and '.join(prefixes)} in {_paths(facts, with_prefix)}"
    return Problem(
        confidence=Confidence.HIGH if has_majority and not other_steps else Confidence.MEDIUM,
        ranks=_file_ranks(facts, blamed),
        tensor=rest if rest and head in {*MODEL_KEYS, "module"} else name,
        summary=f"{many} {verb} {between}{first}{values}",
        evidence=(
            *[_describe_part(facts, part) for part in unequal[:MAX_NAMED]],
            *([f"and {len(unequal) - MAX_NAMED} more"] if len(unequal) > MAX_NAMED else []),
            *([] if has_majority else [WHO_IS_RIGHT]),
            *other_steps,
            *([stripped] if len({file.stripped for file in facts.files}) > 1 else []),
        ),
        fix=fix,
    )


def _file_ranks(facts: DiffFacts, files: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of files, or nothing unless every file name gives a different rank."""
    ranks = [file.rank for file in facts.files]
    if None in ranks or len(set(ranks)) < len(ranks):
        return ()
    return tuple(sorted(rank for number in files if (rank := facts.files[number].rank) is not None))


def _describe_part(facts: DiffFacts, part: Unequal) -> str:
    apart = []
    for pair in part.apart:
        files = f"{_paths(facts, (pair.file,))} against {_paths(facts, (pair.against,))}: "
        size = ""
        if pair.largest is not None:
            size = f", by up to {pair.largest:.3g} ({pair.relative:.3g} of the larger value)"
        odd = f", {pair.not_finite} of them inf or NaN" if pair.not_finite else ""
        apart.append(
            f"{files if len(facts.files) > 2 else ''}{pair.differing} of {pair.of} elements differ, the first at "
            f"[{', '.join(map(str, pair.first))}]{size}{odd}"
        )
    absent = [f"missing in {_paths(facts, part.absent_in)}"] if part.absent_in else []
    values = [_values(facts, part)] if len(set(part.seen)) > 1 else []
    return f"{part.name}: {'; '.join([*values, *apart, *absent])}"


def _values(facts: DiffFacts, part: Unequal) -> str:
    return ", ".join(f"{what} in {_paths(facts, side)}" for what, side in zip(part.seen, part.sides, strict=True))


def _paths(facts: DiffFacts, files: Sequence[int]) -> str:
    ranks = _file_ranks(facts, files)
    if len(files) > MAX_NAMED and len(ranks) == len(files):
        return f"the files of {rank_list(ranks)}"
    base_names = [file.path.rpartition("/")[2] for file in facts.files]
    # A file is named with its folder if another file has the same name.
    names = [
        base_names[number] if base_names.count(base_names[number]) == 1 else facts.files[number].path
        for number in files
    ]
    return first_names(names, MAX_NAMED) if len(names) > MAX_NAMED else name_list(names, MAX_NAMED)
