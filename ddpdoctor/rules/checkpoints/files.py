"""DD710 to DD720: damaged, incomplete and leftover files, names that match no model, and what a resume lacks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.saved import Checksums, Form, ReadState, StatePart, align_names
from ddpdoctor.model.words import count_of, first_names
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.saved import Checkpoints, Expected, FileSeen, OddValues, Weights


def some(names: Sequence[str], noun: str) -> str:
    return f"{count_of(len(names), noun)} ({first_names(names)})"


NO_CHECKSUMS = {
    Checksums.NONE: "damage cannot be detected: the format has no checksums",
    Checksums.NOT_WRITTEN: "damage cannot be detected: checksums were disabled when the file was written",
}
_FIX = "use another copy or an earlier checkpoint; torch.load would silently load this one if only tensors are damaged"


@rule("DD710", "checkpoint-foreign", Severity.ERROR, "A file is not a checkpoint")
def check_foreign(seen: Checkpoints) -> Answer:
    """Report a file that is not a checkpoint."""
    problems, fix = [], "download the file again, and compare its size with the original"
    for file in seen.files:
        if file.state is ReadState.FOREIGN:
            summary = f"{file.path} is not a checkpoint: {file.detail}"
            problems.append(Problem(summary=summary, evidence=(f"{file.size_bytes} bytes",), fix=fix))
    return judged(problems, f"{count_of(len(seen.files) - len(problems), 'file')} of a known format")


@rule("DD711", "checkpoint-damaged", Severity.ERROR, "A checkpoint is damaged")
def check_damaged(seen: Checkpoints) -> Answer:
    """Report records whose checksum is wrong, and the tensors stored in them."""
    problems = []
    for file in seen.files:
        if file.damaged:
            tensors = tuple(name for damage in file.damaged for name in damage.tensors)
            records = tuple(damage.record for damage in file.damaged)
            have = "record has a wrong checksum" if len(records) == 1 else "records have wrong checksums"
            where, tensor = (f" ({first_names(tensors)})", tensors[0]) if tensors else ("", None)
            summary = f"{file.path} is damaged: {len(records)} {have}{where}"
            evidence = [f"wrong CRC-32 in {first_names(records)}", *([file.detail] if file.detail else [])]
            problems.append(Problem(summary=summary, evidence=tuple(evidence), fix=_FIX, tensor=tensor))
        elif file.state is ReadState.UNREADABLE:
            summary = f"the index of {file.path} cannot be read: it is damaged or truncated"
            fix = "use another copy or an earlier checkpoint"
            problems.append(Problem(summary=summary, evidence=(file.detail,), fix=fix))
    checked = [file for file in seen.files if file.checksums is Checksums.CHECKED]
    without = [file for file in seen.files if file.checksums in NO_CHECKSUMS]
    if problems or checked:
        more = f"; {count_of(len(without), 'file')} without checksums" if without else ""
        return judged(problems, f"checksums of {count_of(len(checked), 'file')} computed again{more}")
    return skipped(next((NO_CHECKSUMS[file.checksums] for file in without), "no checksums were read"))


@rule("DD712", "checkpoint-truncated", Severity.ERROR, "A checkpoint is truncated")
def check_truncated(seen: Checkpoints) -> Answer:
    """Report a checkpoint whose end is missing."""
    problems = []
    for file in seen.files:
        if file.state not in {ReadState.CUT, ReadState.EMPTY}:
            continue
        evidence, tensor = [f"{file.size_bytes} bytes", *([file.detail] if file.detail else [])], None
        if file.state is ReadState.EMPTY:
            what, evidence = "empty", ["0 bytes"]
        elif file.form is Form.FOLDER:
            what = f"an incomplete distributed checkpoint: {file.detail}"
            evidence = [f"{file.size_bytes} bytes in total"]
        elif file.contents is None:
            what = "truncated before its index"
        elif not file.lost:
            what = "truncated after its last tensor: torch.load cannot open it, but no tensor is lost"
        else:
            tensors, tensor = count_of(len(file.contents.tensors), "tensor"), file.lost[0]
            are_lost = f"{'is' if len(file.lost) == 1 else 'are'} lost, starting with {tensor}"
            what = f"truncated: {len(file.lost)} of {tensors} {are_lost}"
            evidence.append(f"lost: {some(file.lost, 'tensor')}")
        atomic = "write to a temporary file, os.fsync it, and os.replace it to its name when it is complete"
        summary, fix = f"{file.path} is {what}", f"use an earlier one; {atomic}"
        problems.append(Problem(summary=summary, evidence=tuple(evidence), fix=fix, tensor=tensor))
    return judged(problems, f"{count_of(len(seen.files) - len(problems), 'file')} complete")


@rule("DD715", "checkpoint-nonfinite", Severity.ERROR, "A checkpoint has NaN or inf")
def check_values(seen: Checkpoints) -> Answer:
    """Report tensors with NaN, or with inf among ordinary numbers."""
    looked = [file for file in seen.files if file.values is not None]
    if not looked:
        return skipped("no values were checked")
    problems = []
    for file in looked:
        values = file.values or ()
        broken = [each for each in values if each.nan or (each.above and (each.plain or each.below))]
        doubtful = [each for each in values if each not in broken and each.below and each.plain and not each.above]
        worst = broken or doubtful
        if not worst:
            continue
        what = "NaN" if any(each.nan for each in worst) else "inf" if broken else "-inf among other numbers"
        total = f"; {some([each.name for each in worst], 'tensor')} in total" if len(worst) > 1 else ""
        problems.append(Problem(
            severity=None if broken else Severity.WARNING,
            summary=f"{file.path} has {what}: {_odd_words(worst[0])}{total}",
            evidence=tuple(_odd_words(each) for each in worst[1:4]),
            fix="go back to an earlier checkpoint, and find the step with ddpdoctor wrap"
            if broken
            else "check whether that tensor is a mask; a weight must not have such values",
            tensor=worst[0].name,
        ))  # fmt: skip
    return judged(problems, f"values of {count_of(len(looked), 'file')} checked")


def _odd_words(each: OddValues) -> str:
    numbers = ((each.nan, "NaN"), (each.above, "inf"), (each.below, "-inf"))
    kinds = [f"{number} {name}" for number, name in numbers if number]
    return f"{' and '.join(kinds)} among the {count_of(each.of, 'value')} of {each.name}"


# Names under which DDP and DataParallel, torch.compile, FSDP and activation checkpointing keep the wrapped module.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
NO_WEIGHTS = "it has no model state dict"


@rule("DD713", "checkpoint-prefix", Severity.ERROR, "Names in a state dict have the prefix of a wrapper")
def check_prefix(seen: Checkpoints) -> Answer:
    """Report names that begin with `module.` or `_orig_mod.`, which the model itself does not have."""
    pairs = [(file, weights) for file in seen.files if file.contents for weights in file.contents.weights]
    if not pairs:
        return skipped(NO_WEIGHTS)
    problems = [problem for file, weights in pairs for problem in _prefix(file, weights, seen.expected)]
    prefixes = sorted(
        {prefix for _, weights in pairs for tensor in weights.tensors if (prefix := _wrapper(tensor.name))}
    )
    return judged(problems, f"prefixes: {', '.join(prefixes) or 'none'}")


def _prefix(file: FileSeen, weights: Weights, expected: Expected | None) -> Iterator[Problem]:
    if expected is not None:
        exact, stripped = match_names(weights, expected)
        if stripped > exact:
            name = next(tensor.name for tensor in weights.tensors if strip(tensor.name) != tensor.name)
            prefix = _wrapper(name)
            inner = prefix or next(part for part in name.split(".") if part in WRAPPERS[1:]) + "."
            would = f"{exact} of {count_of(len(expected.tensors), 'tensor')} would load into {expected.function}"
            summary = f"{_weights_place(file, weights)}: {would}, and {stripped} without the prefix {inner}"
            names = f"in the file: {name}; in the model: {strip(name)}"
            evidence = (names, "load_state_dict raises an error; with strict=False it is silent")
            fix = f"for this file: {{name.replace({inner!r}, ''): value for name, value in state.items()}}"
            if prefix:
                consume = "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present"
                fix = f'save model.{prefix}state_dict(); for this file: {consume}(state, "{prefix}")'
            yield Problem(summary=summary, evidence=evidence, fix=fix, tensor=name)
        return
    prefixed = [tensor.name for tensor in weights.tensors if _wrapper(tensor.name)]
    if not prefixed:
        return
    prefix, total = _wrapper(prefixed[0]), len(weights.tensors)
    if len(prefixed) < total:
        plain = next(tensor.name for tensor in weights.tensors if not _wrapper(tensor.name))
        yield Problem(
            severity=Severity.WARNING,
            summary=f"{_weights_place(file, weights)}: {len(prefixed)} of {count_of(total, 'tensor')} have the prefix "
            f"{prefix}, and the others do not: with strict=False, some tensors are silently not loaded",
            evidence=(f"with: {prefixed[0]}", f"without: {plain}"),
            fix="save and load the state dict of the same module",
        )
    else:
        yield Problem(
            severity=Severity.INFO,
            summary=f"{_weights_place(file, weights)}: all {count_of(total, 'tensor')} have the prefix {prefix}: "
            "load_state_dict fails for a model without the wrapper, and with strict=False it silently loads nothing",
            evidence=(f"for example {prefixed[0]}",),
            fix="save model.module.state_dict(); pass --model to see what would load",
        )


def match_names(weights: Weights, expected: Expected) -> tuple[int, int]:
    wanted = {tensor.name: tensor.shape for tensor in expected.tensors}
    exact = sum(wanted.get(tensor.name) == tensor.shape for tensor in weights.tensors)
    return exact, sum(wanted.get(strip(tensor.name)) == tensor.shape for tensor in weights.tensors)


def strip(name: str) -> str:
    parts = name.split(".")
    kept = [part for part in parts if part not in WRAPPERS[1:]]
    return ".".join(kept[1:] if kept and kept[0] == "module" and len(kept) > 1 else kept)


def _wrapper(name: str) -> str:
    found = re.match(rf"(?:(?:{'|'.join(WRAPPERS)})\.)+", name)
    return found[0] if found else ""


def _weights_place(file: FileSeen, weights: Weights) -> str:
    return f"{file.path}, {weights.where}" if weights.where else file.path


@rule("DD714", "checkpoint-keys", Severity.ERROR, "A checkpoint does not match the model")
def check_keys(seen: Checkpoints) -> Answer:
    """Report tensors that only the model or only the file has, or that have other shapes or dtypes."""
    expected = seen.expected
    if expected is None:
        return skipped("no model to compare with (--model)")
    problems: list[Problem] = []
    compared = [
        (file, file.contents.weights) for file in seen.files if file.contents is not None and file.contents.weights
    ]
    for file, weights in compared:
        # A file may hold several state dicts, for example of a GAN: the one that fits the model best counts.
        best = max(weights, key=lambda each: match_names(each, expected)[1])
        problems += _keys(file, best, expected)
    if not compared:
        evidence = (f"the model has {count_of(len(expected.tensors), 'tensor')}",)
        for file in seen.files:
            if file.contents is not None and not file.contents.tensors:
                summary = f"{file.path} does not match {expected.function}: it has no tensors"
                fix = "pass the file with the model's state dict"
                problems.append(Problem(summary=summary, evidence=evidence, fix=fix))
        return judged(problems) if problems else skipped(NO_WEIGHTS)
    return judged(problems, f"{count_of(len(expected.tensors), 'tensor')} of {expected.function} compared")


def _keys(file: FileSeen, weights: Weights, expected: Expected) -> Iterator[Problem]:
    exact, stripped = match_names(weights, expected)
    inside = {(strip(each.name) if stripped > exact else each.name): each for each in weights.tensors}
    wanted = {each.name: each for each in expected.tensors}
    missing = [name for name in wanted if name not in inside]
    unexpected = [name for name in inside if name not in wanted]
    shapes = [name for name in wanted if name in inside and inside[name].shape != wanted[name].shape]
    if missing or unexpected or shapes:
        sizes = [f"{name} is {inside[name].shape} in the file and {wanted[name].shape} in the model" for name in shapes]
        first = [*(f"{name} is missing" for name in missing), *(f"{name} is not in the model" for name in unexpected)]
        yield Problem(
            summary=f"{_weights_place(file, weights)} does not match {expected.function}: {[*sizes, *first][0]}",
            evidence=(
                *(sizes[1:4]),
                *([f"missing in the file: {some(missing, 'tensor')}"] if missing else []),
                *([f"not in the model: {some(unexpected, 'tensor')}"] if unexpected else []),
            ),
            fix="build the same model as when the file was written; with strict=False, missing tensors silently keep "
            "their random values",
            tensor=[*shapes, *missing, *unexpected][0],
        )
    dtypes = [
        name for name in wanted if name in inside and name not in shapes and inside[name].dtype != wanted[name].dtype
    ]
    if dtypes:
        name = dtypes[0]
        apart = f"{name} is {inside[name].dtype} in the file and {wanted[name].dtype} in the model"
        summary = f"{_weights_place(file, weights)}: {some(dtypes, 'tensor')} would be silently converted: {apart}"
        fix = "save and load in the same dtype, unless this is intended"
        yield Problem(severity=Severity.WARNING, summary=summary, fix=fix, tensor=name)


# A file with one of these was written to resume from; a file with weights alone was not.
TRAINING = (StatePart.OPTIMIZER, StatePart.PROGRESS, StatePart.SCHEDULER, StatePart.SCALER)
RUNS_CODE = frozenset(
    {"os", "posix", "nt", "subprocess", "pty", "runpy", "shutil", "socket", "webbrowser", "importlib"}
)
RUNS_CODE_BUILTINS = frozenset({"eval", "exec", "compile", "__import__", "open", "execfile"})


@rule("DD716", "checkpoint-incomplete", Severity.INFO, "A checkpoint may lack state for a resume")
def check_resume(seen: Checkpoints) -> Answer:
    """Report what is missing from a checkpoint that was written to resume from."""
    files = [
        (file.path, file.contents) for file in seen.files if file.contents is not None and file.form is not Form.FOLDER
    ]
    training = [(path, contents) for path, contents in files if set(contents.parts) & set(TRAINING)]
    if not training:
        return skipped("no file to resume from: no file is known to hold more than weights")
    problems = []
    for path, contents in training:
        lacking = ", ".join(part.value for part in StatePart if part not in contents.parts)
        if lacking:
            summary = f"{path} has {', '.join(part.value for part in contents.parts)}, but no {lacking}"
            problems.append(Problem(summary=summary, fix="also save those that your training uses"))
        if contents.empty_optimizer:
            summary = f"{path}: the optimizer had taken no step when it was saved"
            fix = "if this is a resumed training, load the optimizer state before you save it again"
            problems.append(Problem(summary=summary, fix=fix))
    return judged(problems, f"{count_of(len(training), 'file')} to resume from")


@rule("DD719", "checkpoint-unsafe", Severity.WARNING, "torch.load rejects a checkpoint, or would run its code")
def check_refusal(seen: Checkpoints) -> Answer:
    """Report a file that names functions or classes which torch.load would have to call."""
    read = [file for file in seen.files if file.contents is not None and file.state is ReadState.WHOLE]
    if not read:
        return skipped("no index could be read")
    problems = [problem for file in read if (problem := _refusal(file)) is not None]
    return judged(problems, f"{count_of(len(read) - len(problems), 'file')} of tensors and plain values")


def _refusal(file: FileSeen) -> Problem | None:
    names = file.contents.globals if file.contents is not None else ()
    running = []
    for name in names:
        module, _, function = name.rpartition(".")
        is_builtin = module in {"builtins", "__builtin__"}
        if function in RUNS_CODE_BUILTINS if is_builtin else module.partition(".")[0] in RUNS_CODE:
            running.append(name)
    if running:
        summary = f"{file.path} calls {first_names(running)} when it is loaded: it runs code"
        evidence = (f"it names {first_names(names)}", "ddpdoctor did not run it")
        fix = "do not load it with weights_only=False; delete it, and find out where it came from"
        return Problem(severity=Severity.ERROR, summary=summary, evidence=evidence, fix=fix)
    rejects = f"{file.path}: torch.load rejects it"
    if file.refused:
        summary = f"{rejects} (weights_only=True), because it refers to {first_names(file.refused)}"
        last = [name.rpartition(".")[2] for name in file.refused]
        trust = f"if you trust the file: torch.serialization.add_safe_globals([{first_names(last)}])"
        fix = f"save state_dict() and plain values instead; {trust}"
        return Problem(summary=summary, evidence=("to load these, torch would import and call them",), fix=fix)
    if file.refusal:
        return Problem(summary=f"{rejects}: {file.refusal}", fix="save it again with torch.save")
    return None


@rule("DD717", "checkpoint-differs", Severity.ERROR, "Copies of one checkpoint differ")
def check_copies(seen: Checkpoints) -> Answer:
    """Report files that should be equal but hold different tensors."""
    if not seen.copies:
        return skipped("no files to compare (--same)")
    groups = [[seen.files[n] for n in group] for group in seen.copies]
    problems = [problem for files in groups for problem in _compare_copies(files, asked=seen.same_asked)]
    compared = sum(map(len, seen.copies))
    return judged(problems, f"{count_of(compared, 'file')} compared by tensor")


def _compare_copies(files: Sequence[FileSeen], *, asked: bool) -> Iterator[Problem]:
    first = files[0]
    for other in files[1:]:
        if first.digests is None or other.digests is None:
            continue
        prefixes = align_names([first.digests, other.digests])
        sides = []
        for file, prefix in zip((first, other), prefixes, strict=True):  # "": a tensor that could not be read
            listed = dict.fromkeys(
                (tensor.name for tensor in file.contents.tensors) if file.contents is not None else (), ""
            )
            digests = {**listed, **(file.digests or {})}
            sides.append({name.removeprefix(prefix): digest for name, digest in digests.items()})
        left, right = sides
        names = [name for name in {**left, **right} if "" not in (left.get(name), right.get(name))]
        differing = [name for name in names if left.get(name) != right.get(name)]
        count = count_of(len(names), "tensor")
        if differing:
            only = [name for name in differing if name not in left or name not in right]
            much = f"{len(differing)} of {count}: {first_names(differing)}"
            yield Problem(
                severity=None if asked else Severity.INFO,
                summary=f"{other.path} differs from {first.path} in {much}",
                evidence=(f"only in one of them: {some(only, 'tensor')}",) if only else (),
                fix="copy one of them to all nodes, or load on rank 0 before DDP is constructed",
                tensor=differing[0],
            )
        elif any(prefixes):
            keys = zip((first, other), prefixes, strict=True)
            yield Problem(
                severity=Severity.WARNING if asked else Severity.INFO,
                summary=f"{other.path} has the same {count} as {first.path} under other names",
                evidence=tuple(f"{file.path} has them under {key!r}" for file, key in keys if key),
                fix="save both in the same way, or load the part under that key",
            )


@rule("DD718", "checkpoint-leftover", Severity.WARNING, "A checkpoint write was interrupted")
def check_leftovers(seen: Checkpoints) -> Answer:
    """Report temporary files, and files much smaller than others of their kind."""
    fix = "check that no training is writing there, and remove it; resume from the newest complete file"
    summaries = [f"{leftover.path} is {leftover.kind}: {leftover.detail}" for leftover in seen.leftovers]
    problems = [Problem(summary=summary, fix=fix) for summary in summaries]
    return judged(problems, "the names and sizes of the files next to it")


@rule("DD720", "checkpoint-parts", Severity.ERROR, "Files of a checkpoint are missing")
def check_parts(seen: Checkpoints) -> Answer:
    """Report a checkpoint of several files if some of them are missing."""
    fix = "use the previous checkpoint, or copy the files from the node that wrote them"
    lacking = [file for file in seen.files if file.missing]
    problems = [Problem(summary=f"{file.path} is incomplete: {first_names(file.missing)}", fix=fix) for file in lacking]
    for gap in seen.gaps:
        are_missing = f"{'is' if len(gap.missing) == 1 else 'are'} missing"
        summary = f"files {gap.pattern}: {first_names(gap.missing)} {are_missing}"
        problems.append(Problem(summary=summary, evidence=(gap.why,), fix=fix))
    return judged(problems, "no file is missing")
