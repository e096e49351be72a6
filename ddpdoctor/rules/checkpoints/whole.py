"""DD710 to DD712 and DD715: files that are no checkpoints, are damaged or cut off, or hold values that are NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.saved import Checksums, Form, ReadState
from ddpdoctor.model.words import count_of, first_names
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.checkpoints.words import some
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.saved import Checkpoints, FileSeen, OddValues

NO_CHECKSUMS = {
    Checksums.NONE: "damage cannot be detected: the format has no checksums",
    Checksums.NOT_WRITTEN: "damage cannot be detected: checksums were disabled when the file was written",
}
_FIX = "use another copy or an earlier checkpoint; torch.load would silently load this one if only tensors are damaged"


@rule("DD710", "checkpoint-foreign", Severity.ERROR, "A file is not a checkpoint")
def check_foreign(seen: Checkpoints) -> Answer:
    """Report a file that is not a checkpoint."""
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
    """Report records whose checksum is wrong, and the tensors stored in them."""
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
    """Report a checkpoint whose end is missing."""
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
    """Report tensors with NaN, or with inf among ordinary numbers."""
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
