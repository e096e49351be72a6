"""DD717, DD718 and DD720: copies that differ, leftovers of unfinished writes, and missing files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.saved import align_names
from ddpdoctor.model.words import count_of, first_names
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.checkpoints.words import some
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.saved import Checkpoints, FileSeen


@rule("DD717", "checkpoint-differs", Severity.ERROR, "Copies of one checkpoint differ")
def check_copies(seen: Checkpoints) -> Answer:
    """Report files that should be equal but hold different tensors."""
    if not seen.copies:
        return skipped("no files to compare (--same)")
    problems = [
        problem for group in seen.copies for problem in _compare([seen.files[n] for n in group], seen.same_asked)
    ]
    compared = sum(map(len, seen.copies))
    return judged(problems, f"{count_of(compared, 'file')} compared by tensor")


def _compare(files: Sequence[FileSeen], asked: bool) -> list[Problem]:  # noqa: FBT001 - of one caller
    first, problems = files[0], []
    for other in files[1:]:
        if first.digests is None or other.digests is None:
            continue
        prefixes = align_names([first.digests, other.digests])
        left, right = (_without(one, prefix) for one, prefix in zip((first, other), prefixes, strict=True))
        names = [name for name in {**left, **right} if "" not in (left.get(name), right.get(name))]
        differing = [name for name in names if left.get(name) != right.get(name)]
        if differing:
            only = [name for name in differing if name not in left or name not in right]
            problems.append(_difference(first, other, differing, only, len(names), asked=asked))
        elif any(prefixes):
            problems.append(_other_names(first, other, prefixes, len(names), asked=asked))
    return problems


def _without(file: FileSeen, prefix: str) -> dict[str, str]:
    """Return the digest of each tensor by its name without the prefix, or "" for one that could not be read."""
    listed = () if file.contents is None else file.contents.tensors
    digests = {tensor.name: "" for tensor in listed} | (file.digests or {})
    return {name.removeprefix(prefix): digest for name, digest in digests.items()}


def _difference(
    first: FileSeen, other: FileSeen, names: list[str], only: list[str], of: int, *, asked: bool
) -> Problem:
    return Problem(
        severity=None if asked else Severity.INFO,
        summary=f"{other.path} differs from {first.path} in {len(names)} of {count_of(of, 'tensor')}: "
        f"{first_names(names)}",
        evidence=(f"only in one of them: {some(only, 'tensor')}",) if only else (),
        fix="copy one of them to all nodes, or load on rank 0 before DDP is constructed",
        tensor=names[0],
    )


def _other_names(first: FileSeen, other: FileSeen, prefixes: Sequence[str], of: int, *, asked: bool) -> Problem:
    """Report files that hold equal tensors under different keys."""
    under = [f"{file.path} has them under {key!r}" for file, key in zip((first, other), prefixes, strict=True) if key]
    return Problem(
        severity=Severity.WARNING if asked else Severity.INFO,
        summary=f"{other.path} has the same {count_of(of, 'tensor')} as {first.path} under other names",
        evidence=tuple(under),
        fix="save both in the same way, or load the part under that key",
    )


@rule("DD718", "checkpoint-leftover", Severity.WARNING, "A checkpoint write was interrupted")
def check_leftovers(seen: Checkpoints) -> Answer:
    """Report temporary files, and files much smaller than others of their kind."""
    problems = [
        Problem(
            summary=f"{one.path} is {one.kind}: {one.detail}",
            fix="check that no training is writing there, and remove it; resume from the newest complete file",
        )
        for one in seen.leftovers
    ]
    return judged(problems, "the names and sizes of the files next to it")


@rule("DD720", "checkpoint-parts", Severity.ERROR, "Files of a checkpoint are missing")
def check_parts(seen: Checkpoints) -> Answer:
    """Report a checkpoint of several files if some of them are missing."""
    problems = [
        Problem(
            summary=f"{one.path} is incomplete: {first_names(one.missing)}",
            fix="use the previous checkpoint, or copy the files from the node that wrote them",
        )
        for one in seen.files
        if one.missing
    ]
    problems += [
        Problem(
            summary=f"files {gap.pattern}: {first_names(gap.missing)} "
            f"{'is' if len(gap.missing) == 1 else 'are'} missing",
            evidence=(gap.why,),
            fix="use the previous checkpoint, or copy the files from the node that wrote them",
        )
        for gap in seen.gaps
    ]
    return judged(problems, "no file is missing")
