"""DD716 and DD719: what a resume would be missing, and what torch.load refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.saved import Form, ReadState, StatePart
from ddpdoctor.model.words import count_of, first_names
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.saved import Checkpoints, FileSeen

TRAINING = (StatePart.OPTIMIZER, StatePart.PROGRESS, StatePart.SCHEDULER, StatePart.SCALER)
"""A file with one of these was written to resume from; a file with weights alone was not."""
WANTED = (
    StatePart.MODEL,
    StatePart.OPTIMIZER,
    StatePart.SCHEDULER,
    StatePart.SCALER,
    StatePart.RANDOM,
    StatePart.PROGRESS,
)
RUNS_CODE = frozenset(
    {"os", "posix", "nt", "subprocess", "pty", "runpy", "shutil", "socket", "webbrowser", "importlib"}
)
RUNS_CODE_BUILTINS = frozenset({"eval", "exec", "compile", "__import__", "open", "execfile"})


@rule("DD716", "checkpoint-incomplete", Severity.INFO, "A checkpoint may lack state for a resume")
def check_resume(seen: Checkpoints) -> Answer:
    """Report what is missing from a checkpoint that was written to resume from."""
    training = [one for one in seen.files if _is_training(one)]
    if not training:
        return skipped("no file to resume from: no file is known to have more than weights")
    problems = [problem for one in training for problem in _lacks(one)]
    return judged(problems, f"{count_of(len(training), 'file')} to resume from")


def _is_training(one: FileSeen) -> bool:
    return one.contents is not None and bool(set(one.contents.parts) & set(TRAINING)) and one.form is not Form.FOLDER


def _lacks(one: FileSeen) -> list[Problem]:
    contents = one.contents
    assert contents is not None
    problems = []
    lacking = [part.value for part in WANTED if part not in contents.parts]
    if lacking:
        has = ", ".join(part.value for part in contents.parts)
        problems.append(
            Problem(
                summary=f"{one.path} has {has}, but no {', '.join(lacking)}",
                fix="also save those that your training uses",
            )
        )
    if contents.empty_optimizer:
        problems.append(
            Problem(
                summary=f"{one.path}: the optimizer had made no step when it was saved",
                fix="if this is a resumed training, load the optimizer state before you save it again",
            )
        )
    return problems


@rule("DD719", "checkpoint-unsafe", Severity.WARNING, "torch.load rejects a checkpoint, or would run its code")
def check_refusal(seen: Checkpoints) -> Answer:
    """Report a file that names functions or classes which torch.load would have to call."""
    read = [one for one in seen.files if one.contents is not None and one.state is ReadState.WHOLE]
    if not read:
        return skipped("no index could be read")
    problems = [problem for one in read if (problem := _refusal(one)) is not None]
    return judged(problems, f"{count_of(len(read) - len(problems), 'file')} of tensors and plain values")


def _refusal(one: FileSeen) -> Problem | None:
    names = one.contents.globals if one.contents is not None else ()
    running = [name for name in names if _runs_code(name)]
    if running:
        return Problem(
            severity=Severity.ERROR,
            summary=f"{one.path} calls {first_names(running)} when it is loaded: it runs code",
            evidence=(f"it names {first_names(names)}", "ddpdoctor did not run it"),
            fix="do not load it with weights_only=False; delete it, and find out where it came from",
        )
    if one.refused:
        last = [name.rpartition(".")[2] for name in one.refused]
        return Problem(
            summary=(
                f"{one.path}: torch.load rejects it (weights_only=True), because it refers to "
                f"{first_names(one.refused)}"
            ),
            evidence=("to load these, torch would import and call them",),
            fix="save state_dict() and plain values instead; if you trust the file: "
            f"torch.serialization.add_safe_globals([{first_names(last)}])",
        )
    if one.refusal:
        return Problem(summary=f"{one.path}: torch.load rejects it: {one.refusal}", fix="save it again with torch.save")
    return None


def _runs_code(name: str) -> bool:
    module, _, function = name.rpartition(".")
    if module in {"builtins", "__builtin__"}:
        return function in RUNS_CODE_BUILTINS
    return module.partition(".")[0] in RUNS_CODE
