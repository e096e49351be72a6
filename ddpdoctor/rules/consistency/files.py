"""Judges checkpoint files by what they hold: DD501, DD502 and DD505 for files that were compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.saved import MODEL_KEYS, Kind
from ddpdoctor.model.words import first_names, name_list, outvoted, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import also

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.saved import Apart, DiffFacts, Unequal

MAX_NAMED = 5
"""How many tensors a finding names; the report's data has all. Our choice."""
CLOCKS = ("epoch", "step", "iter", "updates")
"""Names under which trainers save how far training was."""
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
    answer = _judge(facts, Kind.PARAMETER)
    if facts.incomparable and not answer.problems:
        names = facts.incomparable
        return unknown(f"{len(names)} tensors have a type that cannot be compared, for example {names[0]}")
    return answer


@also("DD502")
def check_buffer_files(facts: DiffFacts) -> Answer:
    """Report files whose buffers differ."""
    return _judge(facts, Kind.BUFFER)


@also("DD505")
def check_optimizer_files(facts: DiffFacts) -> Answer:
    """Report files whose optimizers differ, and other values that differ."""
    answer = _judge(facts, Kind.STATE, Kind.SETTING)
    others = _other_values(facts)
    return judged([*answer.problems, *others]) if others else answer


def _judge(facts: DiffFacts, *kinds: Kind) -> Answer:
    unequal = [one for one in facts.unequal if one.kind in kinds]
    if unequal:
        return judged([_problem(facts, unequal, FILES_FIX[kinds[0]])])
    return passed() if facts.tensors else skipped("the files contain no tensors")


def _problem(facts: DiffFacts, unequal: Sequence[Unequal], fix: str) -> Problem:
    blamed = _blamed(unequal)
    other_steps = _other_steps(facts)
    sure = len(blamed) < len(facts.files) and not other_steps
    return Problem(
        confidence=Confidence.HIGH if sure else Confidence.MEDIUM,
        ranks=_ranks(facts, blamed),
        tensor=next((_inner_name(one.name) for one in unequal if one.kind is not Kind.SETTING), None),
        summary=_summary(facts, unequal, blamed),
        evidence=(
            *[_describe(facts, one) for one in unequal[:MAX_NAMED]],
            *([f"and {len(unequal) - MAX_NAMED} more"] if len(unequal) > MAX_NAMED else []),
            *([WHO_IS_RIGHT] if len(blamed) == len(facts.files) else []),
            *other_steps,
            *_prefixes(facts),
        ),
        fix=fix,
    )


def _blamed(unequal: Iterable[Unequal]) -> tuple[int, ...]:
    """Return the files in a minority, or all files if any tensor has no majority."""
    found: set[int] = set()
    for one in unequal:
        found.update(outvoted((*one.sides, one.absent_in)))
    return tuple(sorted(found))


def _ranks(facts: DiffFacts, files: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of files, or nothing unless every file name gives a different rank."""
    ranks = [one.rank for one in facts.files]
    if None in ranks or len(set(ranks)) < len(ranks):
        return ()
    return tuple(sorted(rank for number in files if (rank := facts.files[number].rank) is not None))


def _summary(facts: DiffFacts, unequal: Sequence[Unequal], blamed: Sequence[int]) -> str:
    settings = all(one.kind is Kind.SETTING for one in unequal)
    noun = unequal[0].kind.value if len({one.kind for one in unequal}) == 1 else "part of the optimizer"
    many = f"{noun} {unequal[0].name}" if len(unequal) == 1 else f"{len(unequal)} {PLURALS.get(noun, noun + 's')}"
    verb = "differs" if len(unequal) == 1 else "differ"
    first = f", {unequal[0].name} first" if len(unequal) > 1 else ""
    values = f": {_values(facts, unequal[0])}" if settings else ""
    if len(blamed) < len(facts.files):
        return f"{many} {verb} in {_paths(facts, blamed)} from the other files{first}{values}"
    return f"{many} {verb} between {_paths(facts, blamed)}{first}{values}"


def _describe(facts: DiffFacts, one: Unequal) -> str:
    absent = [f"missing in {_paths(facts, one.absent_in)}"] if one.absent_in else []
    apart = [_apart_words(facts, each, named=len(facts.files) > 2) for each in one.apart]
    values = [_values(facts, one)] if len(set(one.seen)) > 1 else []
    return f"{one.name}: {'; '.join([*values, *apart, *absent])}"


def _values(facts: DiffFacts, one: Unequal) -> str:
    return ", ".join(f"{what} in {_paths(facts, side)}" for what, side in zip(one.seen, one.sides, strict=True))


def _apart_words(facts: DiffFacts, one: Apart, *, named: bool) -> str:
    who = f"{_paths(facts, (one.file,))} against {_paths(facts, (one.against,))}: " if named else ""
    at = f"[{', '.join(map(str, one.first))}]"
    size = "" if one.largest is None else f", by up to {one.largest:.3g} ({one.relative:.3g} of the larger value)"
    odd = f", {one.not_finite} of them inf or NaN" if one.not_finite else ""
    return f"{who}{one.differing} of {one.of} elements differ, the first at {at}{size}{odd}"


def _other_steps(facts: DiffFacts) -> list[str]:
    """Say that files record different epochs or steps: then they need not be equal."""
    found = [
        one
        for one in facts.unequal
        if one.kind is Kind.VALUE and any(word in one.name.rpartition(".")[2].lower() for word in CLOCKS)
    ]
    return [f"the files may be from different times: {found[0].name} is {_values(facts, found[0])}"] if found else []


def _prefixes(facts: DiffFacts) -> list[str]:
    """Say which prefixes were removed from names, if not all files have them."""
    if len({one.stripped for one in facts.files}) < 2:
        return []
    with_it = [number for number, one in enumerate(facts.files) if one.stripped]
    prefixes = sorted({prefix for one in facts.files for prefix in one.stripped})
    return [f"names were compared without the prefix {' and '.join(prefixes)} in {_paths(facts, with_it)}"]


def _other_values(facts: DiffFacts) -> list[Problem]:
    """Report other values that differ: they are not drift, but the user asked what differs."""
    unequal = [one for one in facts.unequal if one.kind is Kind.VALUE]
    if not unequal:
        return []
    names = ", ".join(one.name for one in unequal[:MAX_NAMED])
    return [
        Problem(
            severity=Severity.INFO,
            summary=f"values other than tensors differ: {names}",
            evidence=tuple(_describe(facts, one) for one in unequal[:MAX_NAMED]),
            fix="compare files from the same step",
        )
    ]


def _inner_name(name: str) -> str:
    """Return a parameter's own name, without the key under which the file holds the model."""
    head, _, rest = name.partition(".")
    return rest if rest and head in {*MODEL_KEYS, "module"} else name


def _paths(facts: DiffFacts, files: Sequence[int]) -> str:
    ranks = _ranks(facts, files)
    if len(files) > MAX_NAMED and len(ranks) == len(files):
        return f"the files of {rank_list(ranks)}"
    names = [_short(facts, number) for number in files]
    return first_names(names, MAX_NAMED) if len(names) > MAX_NAMED else name_list(names, MAX_NAMED)


def _short(facts: DiffFacts, number: int) -> str:
    """Return a file's name, with its folder if another file has the same name."""
    parts = facts.files[number].path.split("/")
    alike = [one for one in facts.files if one.path.split("/")[-1] == parts[-1]]
    return parts[-1] if len(alike) == 1 else facts.files[number].path
