"""DD710 to DD712 and DD715: files that are no checkpoints, are damaged or cut off, or hold values that are NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.checkpoint import Checksums, Form, ReadState
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import count_of, first_names
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.checkpoints.words import some
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.checkpoint import Checkpoints, FileSeen, OddValues

NO_CHECKSUMS = {
    Checksums.NONE: "damage cannot be detected: the format has no checksums",
    Checksums.NOT_WRITTEN: "damage cannot be detected: checksums were disabled when the file was written",
}
_FIX = "use another copy or an earlier checkpoint; torch.load would silently load this one if only tensors are damaged"


@rule("DD710", "checkpoint-foreign", Severity.ERROR, "A file is not a checkpoint")
def check_foreign(seen: Checkpoints) -> Answer:
    """Report a file that is not a checkpoint.

    ## What it means

    `torch.load` fails on it with a message about pickles or magic numbers that does not mention the cause. Most often
    the file is a git-lfs pointer that was never fetched, an error page that a server sent instead of the file, or an
    archive.

    ## How it is recognized

    By the first bytes: a checkpoint is a zip archive with torch.save's index, a file in the old format of torch.save,
    or a file with a safetensors header.

    ## How sure

    High.

    ## What to do

    Fetch the real file: `git lfs pull`, or download it again and check its size.

    ## Example

        model.pt is not a checkpoint: a pointer of git-lfs
    """
    problems = [
        Problem(
            summary=f"{one.path} is not a checkpoint: {one.detail}",
            evidence=(f"{one.size_bytes} bytes",),
            fix="download the file again, and compare its size with the original",
        )
        for one in seen.files
        if one.state is ReadState.FOREIGN
    ]
    return judged(problems, f"{count_of(len(seen.files) - len(problems), 'file')} of a known form")


@rule("DD711", "checkpoint-damaged", Severity.ERROR, "A checkpoint is damaged")
def check_damaged(seen: Checkpoints) -> Answer:
    """Report records whose checksum is wrong, and the tensors stored in them.

    ## What it means

    A flipped bit or an overwritten block changes weights, and `torch.load` does not check: it loads the file silently,
    and training continues with wrong numbers. Causes are disks, memory, interrupted copies and tools that change line
    endings.

    ## How it is recognized

    `torch.save` writes a CRC-32 of each record into its zip archive. All are computed again, and the index says which
    tensors are in which record. The old format of torch.save and safetensors have no checksums, and
    `torch.serialization.set_crc32_options(False)` writes none: then the check says that it cannot detect damage. In a
    distributed checkpoint, each item in the `.distcp` files is compared with its checksums.

    ## How sure

    High: the chance of a false alarm is one in four billion.

    ## What to do

    Use another copy or an earlier checkpoint. If a copy on another disk is sound, suspect the first one's disk. If a
    copy made a minute ago is damaged, suspect the memory.

    ## Example

        epoch3.pt is damaged: 1 record has a wrong checksum (model.layers.3.weight)
    """
    problems = [_damage(one) for one in seen.files if one.damaged or one.state is ReadState.UNREADABLE]
    checked = [one for one in seen.files if one.checksums is Checksums.CHECKED]
    if problems or checked:
        without = [one for one in seen.files if one.checksums in {Checksums.NONE, Checksums.NOT_WRITTEN}]
        more = f"; {count_of(len(without), 'file')} without checksums" if without else ""
        return judged(problems, f"checksums of {count_of(len(checked), 'file')} computed again{more}")
    read = (one.checksums for one in seen.files if one.checksums in NO_CHECKSUMS)
    return skipped(next((NO_CHECKSUMS[reason] for reason in read), "no checksums were read"))


def _damage(one: FileSeen) -> Problem:
    tensors = tuple(name for damage in one.damaged for name in damage.tensors)
    records = tuple(damage.record for damage in one.damaged)
    if not one.damaged:
        summary = f"the index of {one.path} cannot be read: it is damaged or truncated"
        return Problem(summary=summary, evidence=(one.detail,), fix="use another copy or an earlier checkpoint")
    have = "record has a wrong checksum" if len(records) == 1 else "records have wrong checksums"
    where = f" ({first_names(tensors)})" if tensors else ""
    return Problem(
        summary=f"{one.path} is damaged: {len(records)} {have}{where}",
        evidence=(f"wrong CRC-32 in {first_names(records)}", *([one.detail] if one.detail else [])),
        fix=_FIX,
        tensor=tensors[0] if tensors else None,
    )


@rule("DD712", "checkpoint-truncated", Severity.ERROR, "A checkpoint is truncated")
def check_truncated(seen: Checkpoints) -> Answer:
    """Report a checkpoint whose end is missing.

    ## What it means

    The process died while writing, the disk was full, the copy was interrupted, or the file is still being written.
    `torch.load` fails with `PytorchStreamReader failed reading zip archive: failed finding central directory`.

    ## How it is recognized

    A zip archive has its directory at the end. If it is missing, the remaining part is read from the beginning to find
    out which tensors are whole. In the old format and in safetensors, lengths are stored before the data. A distributed
    checkpoint writes `.metadata` last.

    ## How sure

    High.

    ## What to do

    Use an earlier checkpoint. Write to a temporary file in the same folder, call `os.fsync`, and rename it: then a file
    with the final name is always whole.

    ## Example

        epoch4.pt is truncated: 17 of 62 tensors are lost, starting with model.layers.9.weight
    """
    problems = [_truncation(one) for one in seen.files if one.state in {ReadState.CUT, ReadState.EMPTY}]
    return judged(problems, f"{count_of(len(seen.files) - len(problems), 'file')} complete")


def _truncation(one: FileSeen) -> Problem:
    fix = (
        "use an earlier one; write to a temporary file, os.fsync it, and os.replace it to its name when it is complete"
    )
    if one.state is ReadState.EMPTY:
        return Problem(summary=f"{one.path} is empty", evidence=("0 bytes",), fix=fix)
    evidence = [f"{one.size_bytes} bytes", *([one.detail] if one.detail else [])]
    if one.form is Form.FOLDER:
        summary = f"{one.path} is an incomplete distributed checkpoint: {one.detail}"
        return Problem(summary=summary, evidence=(f"{one.size_bytes} bytes in total",), fix=fix)
    if one.contents is None:
        return Problem(summary=f"{one.path} is truncated before its index", evidence=tuple(evidence), fix=fix)
    tensors = len(one.contents.tensors)
    if not one.lost:
        summary = f"{one.path} is truncated after its last tensor: torch.load cannot open it, but no tensor is lost"
        return Problem(summary=summary, evidence=tuple(evidence), fix=fix)
    verb = "is" if len(one.lost) == 1 else "are"
    return Problem(
        summary=f"{one.path} is truncated: {len(one.lost)} of {count_of(tensors, 'tensor')} {verb} lost, starting with "
        f"{one.lost[0]}",
        evidence=(*evidence, f"lost: {some(one.lost, 'tensor')}"),
        fix=fix,
        tensor=one.lost[0],
    )


@rule("DD715", "checkpoint-nonfinite", Severity.ERROR, "A checkpoint has NaN or inf")
def check_values(seen: Checkpoints) -> Answer:
    """Report tensors with NaN, or with inf among ordinary numbers.

    ## What it means

    Training went wrong before this file was written: if you resume from it, you train on NaN. In optimizer state it
    stays hidden until the next step.

    ## How it is recognized

    All values of all floating-point tensors are checked, through a memory map of the file. Intended values are not
    reported: a tensor that holds only inf (a best value that was never reached, an observer's initial limits) or only
    zeros and -inf (a mask). A tensor whose only non-finite values are -inf among other numbers is a warning, because it
    may be a mask that includes a bias.

    ## How sure

    High for NaN.

    ## What to do

    Go back to an earlier checkpoint and continue training under `ddpdoctor wrap`, which names the rank and step at
    which gradients stop being finite. With mixed precision, save only after a step that the GradScaler did not skip.

    ## Example

        last.pt has NaN: 12 of 4096 values of model.layers.7.weight
    """
    looked = [one for one in seen.files if one.values is not None]
    if not looked:
        return skipped("no values were checked")
    problems = [problem for one in looked if (problem := _judge(one)) is not None]
    return judged(problems, f"values of {count_of(len(looked), 'file')} checked")


def _judge(one: FileSeen) -> Problem | None:
    values = one.values or ()
    broken = [each for each in values if each.nan or (each.above and (each.plain or each.below))]
    doubtful = [each for each in values if each not in broken and each.below and each.plain and not each.above]
    if not broken and not doubtful:
        return None
    worst = broken or doubtful
    first = worst[0]
    names = [each.name for each in worst]
    what = "NaN" if any(each.nan for each in worst) else "inf" if broken else "-inf among other numbers"
    return Problem(
        severity=None if broken else Severity.WARNING,
        summary=f"{one.path} has {what}: {_words(first)}"
        + (f"; {some(names, 'tensor')} in total" if len(names) > 1 else ""),
        evidence=tuple(_words(each) for each in worst[1:4]),
        fix="go back to an earlier checkpoint, and find the step with ddpdoctor wrap"
        if broken
        else "check whether that tensor is a mask; a weight must not have such values",
        tensor=first.name,
    )


def _words(each: OddValues) -> str:
    kinds = [
        f"{number} {name}" for number, name in ((each.nan, "NaN"), (each.above, "inf"), (each.below, "-inf")) if number
    ]
    return f"{' and '.join(kinds)} among the {count_of(each.of, 'value')} of {each.name}"
