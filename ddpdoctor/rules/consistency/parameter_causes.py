"""Why parameters differ: gradients, steps, optimizer settings or state, or something else that wrote to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.words import group_alike, rank_list
from ddpdoctor.rules.consistency.gradients import added_after_wrapping, why_gradients_differ
from ddpdoctor.rules.consistency.problems import (
    DriftBlame,
    DriftCause,
    Ground,
    blame_of,
    blame_outvoted,
    seen,
    sides_words,
)
from ddpdoctor.rules.consistency.replicas import is_aligned, sightings, values_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.consistency import Values
    from ddpdoctor.rules.consistency.replicas import Sighting

MAX_SETTINGS = 3
"""How many settings that differ are shown with their values. Our choice."""
SAME_SETTINGS = (
    "use the same optimizer settings on all ranks; step the scheduler on all ranks, and give a scheduler that uses the "
    "loss (ReduceLROnPlateau) the mean over all ranks"
)
_LBFGS = "LBFGS"
UNEVEN_STEPS = "steps"
"""Name of the cause that ranks made different numbers of steps."""
_UNSEEN = ", or gradients were changed after the reduction in a step that was not compared"
_SEE_EACH = "; --check-every 1 shows the exact step, and whether gradients differ in it"
_LOAD_DDP = "load the checkpoint before you wrap the model in DDP, or on all ranks"
_LOAD_MESH = "initialize and load on all ranks, as torch.distributed.checkpoint does"
_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that choose how a step is computed, not what: they change the last bits at most."""
_DECAY = "weight_decay"
_DECOUPLED = frozenset({"AdamW"})
"""Optimizers whose weight decay does not go through their state."""


def why_parameters_differ(sighting: Sighting) -> DriftCause:
    """Return the likely cause of parameters that differ."""
    for check in (
        _follows_gradients,
        _uneven_steps,
        _some_steps_unreduced,
        _settings,
        added_after_wrapping,
        _line_search,
        _state,
    ):
        cause = check(sighting)
        if cause is not None:
            return cause
    return _written_on_one_rank(sighting)


def _follows_gradients(sighting: Sighting) -> DriftCause | None:
    for earlier in sightings(sighting.replica, What.GRADIENT):
        if earlier.step <= sighting.step and is_aligned(earlier.values):
            cause = why_gradients_differ(earlier)
            blame = cause.blame or blame_of(earlier.difference.splits)
            return replace(cause, words=f"the gradients differ since step {earlier.step}: {cause.words}", blame=blame)
    return None


def _uneven_steps(sighting: Sighting) -> DriftCause | None:
    sides = group_alike({each.rank: each.steps for each in sighting.values})
    if len(sides) < 2:
        return None
    counts = sides_words(sides, lambda steps: f"{steps} steps")
    return DriftCause(
        name=UNEVEN_STEPS,
        words=f"the ranks made different numbers of steps: {counts}",
        fix=(
            "call optimizer.step() equally often on all ranks: do not branch on the rank, the local loss or the local "
            "batch"
        ),
        blame=blame_outvoted([ranks for _, ranks in sides]),
        at_the_step=True,
    )


def _some_steps_unreduced(sighting: Sighting) -> DriftCause | None:
    """Return the cause if fewer backwards were reduced than steps made, unless that was already true earlier."""
    now, before = next(iter(sighting.values), None), next(iter(sighting.before), None)
    if now is None or sighting.stream.clock is not StreamClock.STEP:
        return None
    if before is not None and before.reductions < before.steps:
        return None
    steps = now.steps - (before.steps if before else 0)
    missing = steps - (now.reductions - (before.reductions if before else 0))
    if missing <= 0:
        return None
    return DriftCause(
        name="steps without a reduction",
        words=f"{missing} of the last {steps} steps had no gradient reduction",
        fix="call the DDP object itself in every training step, and run the last batch before step() outside "
        "no_sync(), also when an epoch ends during an accumulation",
        blame=seen(sighting.values),
        unsynchronized=True,
        at_the_step=True,
    )


def _settings(sighting: Sighting) -> DriftCause | None:
    values = sighting.values if any(each.settings for each in sighting.values) else _last_settings(sighting)
    splits = splits_of(values, kernels=True)
    if not splits:
        return None
    texts = "; ".join(split.words for split in splits[:MAX_SETTINGS])
    return DriftCause(
        name="settings",
        words=f"the optimizer has different settings: {texts}",
        fix=SAME_SETTINGS,
        blame=splits[0].blame,
        at_the_step=True,
    )


def _last_settings(sighting: Sighting) -> tuple[Values, ...]:
    """Return what ranks wrote at their last steps, for a comparison that recorded no optimizer."""
    found = [values_at(one, one.last_number) for one in sighting.replica.streams if one.clock is StreamClock.STEP]
    return next((values for values in found if values), ())


def _line_search(sighting: Sighting) -> DriftCause | None:
    if not any(_LBFGS in each.optimizer for each in sighting.values):
        return None
    return DriftCause(
        name="line search",
        words="LBFGS uses the loss that its closure returns, and that loss differs between ranks",
        fix="return the mean loss over all ranks (all_reduce) from the closure",
        at_the_step=True,
    )


def _state(sighting: Sighting) -> DriftCause | None:
    of_state = next((one for one in sightings(sighting.replica, What.STATE) if one.step <= sighting.step), None)
    if of_state is None or state_follows_parameters(sighting.values):
        return None
    return DriftCause(
        name="optimizer state",
        words=f"the optimizer state differs since step {of_state.step}, with equal gradients{or_unseen(of_state)}",
        fix=f"load the optimizer state on all ranks from the same file{to_see_each(of_state)}",
        blame=blame_of(of_state.difference.splits),
    )


def _written_on_one_rank(sighting: Sighting) -> DriftCause:
    never = "" if sighting.last_good is not None else "; or they were never equal (init_sync=False)"
    return DriftCause(
        name="written",
        words=f"something other than the optimizer step changed them on {_writers(sighting)}, such as a checkpoint "
        f"loaded only there or an in-place edit{or_unseen(sighting)}{never}",
        fix=f"{_LOAD_MESH if sighting.replica.mesh_dims else _LOAD_DDP}; change parameters the same way on all ranks, "
        f"or broadcast them afterwards{to_see_each(sighting)}",
    )


def or_unseen(sighting: Sighting) -> str:
    """Return what else may have happened if steps since the last good one were not compared, or "".

    The gradients of such a step are gone: only parameters and state show what they did.
    """
    return _UNSEEN if _leaves_steps_out(sighting) else ""


def to_see_each(sighting: Sighting) -> str:
    """Return how to find the exact step if it is not known, or ""."""
    return _SEE_EACH if _leaves_steps_out(sighting) else ""


def _leaves_steps_out(sighting: Sighting) -> bool:
    return sighting.step - (sighting.last_good or 0) > 1


def _writers(sighting: Sighting) -> str:
    splits = sighting.difference.splits
    blame = blame_of(splits)
    if blame.ground is Ground.MAJORITY:
        return rank_list(blame.ranks)
    return "one rank" if len(splits[0].sides) == 2 else "several ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSplit:
    """A setting that has different values on different ranks."""

    name: str
    sides: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def blame(self) -> DriftBlame:
        """Return the ranks whose value is not that of the majority."""
        return blame_outvoted([ranks for _, ranks in self.sides])

    @property
    def words(self) -> str:
        """Return "lr is 0.1 on ranks 0 and 1, 0.01 on rank 2"."""
        return f"{self.name} is {sides_words(self.sides)}"


def splits_of(values: Sequence[Values], *, kernels: bool = False) -> tuple[SettingSplit, ...]:
    """Return the settings that differ between ranks. ``kernels`` includes those that only choose a kernel."""
    known = [each for each in values if each.settings]
    names = dict.fromkeys(name for each in known for name, _ in each.settings)
    found = []
    for name in names:
        if base_name(name) in _KERNELS and not kernels:
            continue
        sides = group_alike({each.rank: dict(each.settings).get(name, "not set") for each in known})
        if len(sides) > 1:
            found.append(SettingSplit(name=name, sides=tuple(sides)))
    return tuple(found)


def base_name(name: str) -> str:
    """Return the name of a setting without its group: "lr" of "1.lr"."""
    return name.rpartition(".")[2]


def state_follows_parameters(values: Sequence[Values]) -> bool:
    """Return whether the state depends on the parameters, because weight decay is added to the gradient."""
    return any(
        each.optimizer.rpartition(".")[2] not in _DECOUPLED
        and any(base_name(name) == _DECAY and _is_on(text) for name, text in each.settings)
        for each in values
    )


def _is_on(text: str) -> bool:
    try:
        return float(text) != 0
    except ValueError:
        return True
