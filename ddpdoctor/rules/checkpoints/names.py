"""DD713 and DD714: names of a state dict, with prefixes that wrappers leave, and against the model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import rule

from .words import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.model.checkpoint import Checkpoints, Expected, FileSeen, TensorIn, Weights

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Under which DDP and DataParallel, torch.compile, FSDP and activation checkpointing keep the module that they wrap."""
NO_WEIGHTS = "no state dict of a model was found in it"


@rule("DD713", "checkpoint-prefix", Severity.ERROR, "Names of a state dict carry a wrapper's prefix")
def check_prefix(seen: Checkpoints) -> Answer:
    """Report names that begin with `module.` or `_orig_mod.`, which the model itself does not have.

    ## What it means

    `ddp_model.state_dict()` names every tensor `module.`..., that of a compiled model `_orig_mod.`.... Loaded into the
    model itself, `strict=True` raises; with `strict=False` **nothing** is loaded and nothing is said: training starts
    anew from random weights, or an evaluation gives the numbers of chance.

    ## How it is recognised

    With `--model`: names that the model has only without the prefix, which may stand within them too, where one layer
    was compiled. It then says how many would load. Without: all names have a prefix, which is only a note, because it
    is right for a model that is wrapped before it is loaded; or some have it and others not, which fits no model and is
    a warning.

    ## How sure

    High with `--model`.

    ## What to do

    Save the module inside: `model.module.state_dict()`. Of a file that is there already take the prefix off:
    `torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")`. Never load with `strict=False`
    without looking at what it returns.

    ## Example

        last.pt: 0 of 62 tensors would load into train:build_model, and 62 without the prefix module.
    """
    pairs = [(one, weights) for one in seen.files if one.contents for weights in one.contents.weights]
    if not pairs:
        return skipped(NO_WEIGHTS)
    problems = [problem for one, weights in pairs for problem in _prefix(one, weights, seen.expected)]
    prefixes = sorted({prefix for _, weights in pairs for prefix in _prefixes(weights.tensors)})
    return judged(problems, f"prefixes: {', '.join(prefixes) or 'none'}")


def _prefix(one: FileSeen, weights: Weights, expected: Expected | None) -> Iterator[Problem]:
    if expected is not None:
        match = match_names(weights, expected)
        if match.stripped > match.exact:
            yield _mismatch(one, weights, expected, match)
        return
    prefixed = [tensor.name for tensor in weights.tensors if _wrapper(tensor.name)]
    if not prefixed:
        return
    prefix, total = _wrapper(prefixed[0]), len(weights.tensors)
    if len(prefixed) < total:
        yield Problem(
            severity=Severity.WARNING,
            summary=f"{_place(one, weights)}: {len(prefixed)} of {count_of(total, 'tensor')} have the prefix {prefix} "
            "and the others not: with strict=False some of them are not loaded into any model, in silence",
            evidence=(f"with: {prefixed[0]}", f"without: {_first_plain(weights.tensors)}"),
            fix="save the state dict of one module, the same one that it is loaded into",
        )
    else:
        yield Problem(
            severity=Severity.INFO,
            summary=f"{_place(one, weights)}: all {count_of(total, 'tensor')} have the prefix {prefix}: "
            "load_state_dict into a model without the wrapper raises, and with strict=False loads nothing, in silence",
            evidence=(f"as {prefixed[0]}",),
            fix="save model.module.state_dict(); give --model to see what would load",
        )


def _mismatch(one: FileSeen, weights: Weights, expected: Expected, match: Match) -> Problem:
    name = next(tensor.name for tensor in weights.tensors if strip(tensor.name) != tensor.name)
    prefix = _wrapper(name)
    inner = prefix or next(part for part in name.split(".") if part in WRAPPERS[1:]) + "."
    return Problem(
        summary=f"{_place(one, weights)}: {match.exact} of {count_of(len(expected.tensors), 'tensor')} would load into "
        f"{expected.function}, and {match.stripped} without the prefix {inner}",
        evidence=(
            f"in the file: {name}; in the model: {strip(name)}",
            "load_state_dict raises; with strict=False it says nothing",
        ),
        fix=f"save model.{prefix}state_dict(); for this file: torch.nn.modules.utils."
        f'consume_prefix_in_state_dict_if_present(state, "{prefix}")'
        if prefix
        else f"for this file: {{name.replace({inner!r}, ''): value for name, value in state.items()}}",
        tensor=name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How the names of a state dict and of a model fit together."""

    exact: int
    """Names that both have, with one shape."""
    stripped: int
    """The same, without prefixes in the file."""


def match_names(weights: Weights, expected: Expected) -> Match:
    """Return how many tensors of the model a state dict would fill."""
    wanted = {tensor.name: tensor.shape for tensor in expected.tensors}
    exact = sum(wanted.get(tensor.name) == tensor.shape for tensor in weights.tensors)
    stripped = sum(wanted.get(strip(tensor.name)) == tensor.shape for tensor in weights.tensors)
    return Match(exact=exact, stripped=stripped)


def strip(name: str) -> str:
    """Return a name without the prefixes that wrappers leave, at its beginning and within."""
    return ".".join(_without_first_module(name.split(".")))


def _without_first_module(parts: list[str]) -> list[str]:
    """Take out wrappers; "module" only at the beginning, since a model may have a layer of that name."""
    kept = [part for part in parts if part not in WRAPPERS[1:]]
    return kept[1:] if kept and kept[0] == "module" and len(kept) > 1 else kept


def _wrapper(name: str) -> str:
    """Return the prefix of wrappers that a name begins with, as "module._orig_mod."; empty where there is none."""
    found = re.match(rf"(?:(?:{'|'.join(WRAPPERS)})\.)+", name)
    return found[0] if found else ""


def _prefixes(tensors: Iterable[TensorIn]) -> set[str]:
    return {prefix for tensor in tensors if (prefix := _wrapper(tensor.name))}


def _first_plain(tensors: Iterable[TensorIn]) -> str:
    return next(tensor.name for tensor in tensors if not _wrapper(tensor.name))


def _place(one: FileSeen, weights: Weights) -> str:
    return f"{one.path}, {weights.where}" if weights.where else one.path


@rule("DD714", "checkpoint-keys", Severity.ERROR, "A checkpoint does not fit the model")
def check_keys(seen: Checkpoints) -> Answer:
    """Report tensors that the model has and the file has not, that the file has and the model not, and other shapes.

    ## What it means

    With `strict=True` loading raises at them. With `strict=False` missing ones keep their random values, in silence;
    shapes that differ raise all the same. Another dtype is converted without a word: float32 weights from a bfloat16
    file have lost two digits of three.

    ## How it is recognised

    With `--model`: names, shapes and dtypes of `build_model().state_dict()` are compared with those of the state dict
    in the file that fits best. What a wrapper's prefix explains is DD713's.

    ## How sure

    High. A dtype that differs is a warning, since it may be meant.

    ## What to do

    Build the model as it was when the file was written: classes, layers, vocabulary, tied weights.

    ## Example

        last.pt does not fit train:build_model: head.weight is (10, 64) in the file and (12, 64) in the model
    """
    if seen.expected is None:
        return skipped("there is no model to compare with (--model)")
    problems: list[Problem] = []
    compared = 0
    for one in seen.files:
        found = best_weights(one, seen.expected)
        if found is not None:
            compared += 1
            problems += _keys(one, found, seen.expected)
    if not compared:
        empty = [one for one in seen.files if one.contents is not None and not one.contents.tensors]
        return judged([_empty(one, seen.expected) for one in empty], "") if empty else skipped(NO_WEIGHTS)
    return judged(problems, f"{count_of(len(seen.expected.tensors), 'tensor')} of {seen.expected.function} compared")


def _empty(one: FileSeen, expected: Expected) -> Problem:
    return Problem(
        summary=f"{one.path} does not fit {expected.function}: there is no tensor in it",
        evidence=(f"the model has {count_of(len(expected.tensors), 'tensor')}",),
        fix="name the file that holds the model's state dict",
    )


def best_weights(one: FileSeen, expected: Expected) -> Weights | None:
    """Return the state dict of a file that fits the model best: a file may hold several, as those of a GAN."""
    weights = one.contents.weights if one.contents is not None else ()
    return max(weights, key=lambda each: match_names(each, expected).stripped, default=None)


def _keys(one: FileSeen, weights: Weights, expected: Expected) -> Iterator[Problem]:
    match = match_names(weights, expected)
    inside = {(strip(each.name) if match.stripped > match.exact else each.name): each for each in weights.tensors}
    wanted = {each.name: each for each in expected.tensors}
    missing = [name for name in wanted if name not in inside]
    unexpected = [name for name in inside if name not in wanted]
    shapes = [name for name in wanted if name in inside and inside[name].shape != wanted[name].shape]
    if missing or unexpected or shapes:
        yield _misfit(one, weights, expected, (missing, unexpected, shapes), inside)
    dtypes = [
        name for name in wanted if name in inside and name not in shapes and inside[name].dtype != wanted[name].dtype
    ]
    if dtypes:
        first = dtypes[0]
        yield Problem(
            severity=Severity.WARNING,
            summary=f"{_place(one, weights)}: {some(dtypes, 'tensor')} would be converted, in silence: {first} is "
            f"{inside[first].dtype} in the file and {wanted[first].dtype} in the model",
            fix="save and load in one dtype, where this is not meant",
            tensor=first,
        )


def _misfit(
    one: FileSeen,
    weights: Weights,
    expected: Expected,
    names: tuple[list[str], list[str], list[str]],
    inside: dict[str, TensorIn],
) -> Problem:
    missing, unexpected, shapes = names
    wanted = {each.name: each for each in expected.tensors}
    sizes = [f"{name} is {inside[name].shape} in the file and {wanted[name].shape} in the model" for name in shapes]
    first = [
        *sizes,
        *(f"{name} is missing" for name in missing),
        *(f"{name} is not in the model" for name in unexpected),
    ]
    evidence = (
        *(sizes[1:4]),
        *([f"missing in the file: {some(missing, 'tensor')}"] if missing else []),
        *([f"not in the model: {some(unexpected, 'tensor')}"] if unexpected else []),
    )
    return Problem(
        summary=f"{_place(one, weights)} does not fit {expected.function}: {first[0]}",
        evidence=evidence,
        fix="build the model as it was when the file was written; strict=False would leave what is missing at its "
        "random values, in silence",
        tensor=[*shapes, *missing, *unexpected][0],
    )
