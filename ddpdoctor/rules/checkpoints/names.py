"""DD713 and DD714: names in a state dict that have prefixes from wrappers, or do not match the model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import count_of
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.checkpoints.words import some
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.saved import Checkpoints, Expected, FileSeen, TensorIn, Weights

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which DDP and DataParallel, torch.compile, FSDP and activation checkpointing keep the wrapped module."""
NO_WEIGHTS = "it has no model state dict"


@rule("DD713", "checkpoint-prefix", Severity.ERROR, "Names in a state dict have the prefix of a wrapper")
def check_prefix(seen: Checkpoints) -> Answer:
    """Report names that begin with `module.` or `_orig_mod.`, which the model itself does not have."""
    pairs = [(one, weights) for one in seen.files if one.contents for weights in one.contents.weights]
    if not pairs:
        return skipped(NO_WEIGHTS)
    problems = [problem for one, weights in pairs for problem in _prefix(one, weights, seen.expected)]
    prefixes = sorted({prefix for _, weights in pairs for one in weights.tensors if (prefix := _wrapper(one.name))})
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
        plain = next(tensor.name for tensor in weights.tensors if not _wrapper(tensor.name))
        yield Problem(
            severity=Severity.WARNING,
            summary=f"{_place(one, weights)}: {len(prefixed)} of {count_of(total, 'tensor')} have the prefix {prefix}, "
            "and the others do not: with strict=False, some tensors are silently not loaded",
            evidence=(f"with: {prefixed[0]}", f"without: {plain}"),
            fix="save and load the state dict of the same module",
        )
    else:
        yield Problem(
            severity=Severity.INFO,
            summary=f"{_place(one, weights)}: all {count_of(total, 'tensor')} have the prefix {prefix}: "
            "load_state_dict fails for a model without the wrapper, and with strict=False it silently loads nothing",
            evidence=(f"for example {prefixed[0]}",),
            fix="save model.module.state_dict(); pass --model to see what would load",
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
            "load_state_dict raises an error; with strict=False it is silent",
        ),
        fix=f"save model.{prefix}state_dict(); for this file: torch.nn.modules.utils."
        f'consume_prefix_in_state_dict_if_present(state, "{prefix}")'
        if prefix
        else f"for this file: {{name.replace({inner!r}, ''): value for name, value in state.items()}}",
        tensor=name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How well the names of a state dict match those of a model."""

    exact: int
    """How many names both have, with the same shape."""
    stripped: int
    """The same count after removing prefixes from the file's names."""


def match_names(weights: Weights, expected: Expected) -> Match:
    """Return how many tensors of the model a state dict would fill."""
    wanted = {tensor.name: tensor.shape for tensor in expected.tensors}
    exact = sum(wanted.get(tensor.name) == tensor.shape for tensor in weights.tensors)
    stripped = sum(wanted.get(strip(tensor.name)) == tensor.shape for tensor in weights.tensors)
    return Match(exact=exact, stripped=stripped)


def strip(name: str) -> str:
    """Return a name without wrapper prefixes, both at its beginning and inside."""
    return ".".join(_without_first_module(name.split(".")))


def _without_first_module(parts: list[str]) -> list[str]:
    """Remove wrappers, but "module" only at the beginning, since a model may have a layer of that name."""
    kept = [part for part in parts if part not in WRAPPERS[1:]]
    return kept[1:] if kept and kept[0] == "module" and len(kept) > 1 else kept


def _wrapper(name: str) -> str:
    """Return the wrapper prefix that a name begins with, such as "module._orig_mod.", or ""."""
    found = re.match(rf"(?:(?:{'|'.join(WRAPPERS)})\.)+", name)
    return found[0] if found else ""


def _place(one: FileSeen, weights: Weights) -> str:
    return f"{one.path}, {weights.where}" if weights.where else one.path


@rule("DD714", "checkpoint-keys", Severity.ERROR, "A checkpoint does not match the model")
def check_keys(seen: Checkpoints) -> Answer:
    """Report tensors that only the model or only the file has, or that have other shapes or dtypes."""
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
        summary=f"{one.path} does not match {expected.function}: it has no tensors",
        evidence=(f"the model has {count_of(len(expected.tensors), 'tensor')}",),
        fix="pass the file with the model's state dict",
    )


def best_weights(one: FileSeen, expected: Expected) -> Weights | None:
    """Return the state dict of a file that fits the model best. A file may hold several, for example of a GAN."""
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
            summary=f"{_place(one, weights)}: {some(dtypes, 'tensor')} would be silently converted: {first} is "
            f"{inside[first].dtype} in the file and {wanted[first].dtype} in the model",
            fix="save and load in the same dtype, unless this is intended",
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
        summary=f"{_place(one, weights)} does not match {expected.function}: {first[0]}",
        evidence=evidence,
        fix="build the same model as when the file was written; with strict=False, missing tensors silently keep "
        "their random values",
        tensor=[*shapes, *missing, *unexpected][0],
    )
