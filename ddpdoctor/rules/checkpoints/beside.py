"""DD717, DD718 and DD720: copies that differ, leftovers of unfinished writes, and missing files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import count_of, first_names
from ddpdoctor.model.tensor_names import align_names
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.checkpoints.words import some
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.checkpoint import Checkpoints, FileSeen


@rule("DD717", "checkpoint-differs", Severity.ERROR, "Copies of one checkpoint differ")
def check_copies(seen: Checkpoints) -> Answer:
    """Report files that should be equal but hold different tensors.

    ## What it means

    If each node loads its own copy, ranks start from different weights, and DDP does not notice: it sends rank 0's
    parameters only when it is constructed, and never compares what is loaded later.

    ## How it is recognized

    Files are compared tensor by tensor: names, shapes, dtypes, and a 128-bit digest of the values. With `--same` these
    are all given files, without it those with the same name in different folders. Other bytes, such as dates and the
    order of keys, do not count. A key around the whole model ({"model": ...}) is removed first; if only that key
    differs, it is a warning. A tensor that cannot be read is not compared. Without `--same` a difference is only a
    note, because two runs may use the same file name.

    ## How sure

    High.

    ## What to do

    Copy the file of one node to all nodes, or load it on rank 0 before DDP is constructed, which then sends it to all.

    ## Example

        node1/last.pt differs from node0/last.pt in 1 of 62 tensors: model.head.bias
    """
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
    """Report temporary files, and files much smaller than others of their kind.

    ## What it means

    A temporary file that is still there means that its writer was killed before renaming it: the newest checkpoint may
    be older than you think. A file much smaller than those of other steps was cut off, or holds less.

    ## How it is recognized

    In the folders of the given files: names that end in `.tmp`, `.part`, `.partial`, `.incomplete`, `~` or begin with
    `tmp`. Also a given file that is smaller than half of the median size of two or more files whose names differ from
    its own only in numbers.

    ## How sure

    Medium: a write may be in progress.

    ## What to do

    Remove it if no training is writing there. Check the newest whole file before you resume.

    ## Example

        epoch4.pt.tmp is a temporary file of a write: 1048576 bytes; epoch4.pt is not there
    """
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
    """Report a checkpoint of several files if some of them are missing.

    ## What it means

    A rank died before it had written its part, or not everything was copied. The rest cannot be loaded or, worse, is
    loaded without the missing part.

    ## How it is recognized

    `.metadata` of a distributed checkpoint names its files and the bytes that each holds. Files numbered
    `-00001-of-00003` say how many there are. For files with a rank in their names, a file is missing if other steps
    have a rank that this step lacks, or if the numbers have a gap.

    ## How sure

    High if the files themselves say how many there are. Medium for ranks.

    ## What to do

    Use the previous step, or copy the missing files from the node that wrote them: without a shared file system, each
    node has only its own.

    ## Example

        files step200_rank*.pt: step200_rank3.pt is missing
    """
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
