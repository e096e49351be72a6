"""Which settings the launches of a job try, each from its start: those that a running job cannot change, if needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.tuning import RatioRange, RestartPlan, TrialStop
from ddpdoctor.rules.speed.input import predict_workers, workers_to_try
from ddpdoctor.rules.speed.ranks import threads_to_try

from .settings import THREADS, WORKERS, name_of, value_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ddpdoctor.model.tuning import TrialRecord
    from ddpdoctor.rules.speed.state import SpeedState

RESTARTED = (WORKERS, THREADS)
"""What no running job can change."""
CAUSES = {WORKERS: "input-bound", THREADS: "cpu-oversubscribed"}
"""By setting: the kind of the finding that makes it worth trying."""
SENTENCES = {
    WORKERS: "the ranks wait for their data (input-bound)",
    THREADS: "the ranks have more threads than cores (cpu-oversubscribed)",
}


def plan_restarts(
    trial: TrialRecord, state: SpeedState | None, kinds: Collection[str], only: Collection[str]
) -> RestartPlan | None:
    """Return what to try by restarts, or None if nothing calls for them.

    Args:
        trial: What the first launch recorded.
        state: How fast it was, if that is known.
        kinds: Kinds of what the rules of speed found in it.
        only: Names of the settings to try; empty: all that fit.
    """
    wanted = [name for name in RESTARTED if (name in only if only else CAUSES[name] in kinds)]
    fixed = trial.stop in {TrialStop.CANNOT_SWITCH, TrialStop.SEVERAL_MODELS}
    of_ddp = [one for one in trial.fits if fixed and (not only or name_of(one) in only)]
    if not wanted and not of_ddp:
        return None
    values, refused = _values(wanted, state)
    return RestartPlan(settings=(*of_ddp, *values), refused=refused, why=_why(trial, of_ddp, wanted, only))


def _values(wanted: Iterable[str], state: SpeedState | None) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """Return the numbers of workers and threads to try, and why there is none."""
    values: list[str] = []
    refused: list[tuple[str, str]] = []
    for name in wanted:
        if name == WORKERS:
            values += [f"{WORKERS}={count}" for count in workers_to_try(state)]
            continue
        present, share = threads_to_try(state) if state is not None else (0, 0)
        if not share or present == share:
            reason = f"a rank has {present} already: the cores / the ranks" if share else "unknown number of cores"
            refused.append((name, reason))
        else:
            values.append(f"{THREADS}={share}")
    return values, tuple(refused)


def _why(trial: TrialRecord, of_ddp: list[str], wanted: list[str], only: Collection[str]) -> str:
    reasons = []
    if of_ddp:
        several = f"there are {trial.models} models of DistributedDataParallel"
        reason = several if trial.stop is TrialStop.SEVERAL_MODELS else trial.reason
        reasons.append(f"the settings of this job cannot be changed while it runs: {reason}")
    reasons += ["a running job cannot change its " + name if only else SENTENCES[name] for name in wanted]
    return "; ".join(reasons)


def predict_restarts(state: SpeedState | None, settings: Iterable[str]) -> dict[str, RatioRange]:
    """Return the predicted step by number of workers, as a ratio to the present one."""
    found: dict[str, RatioRange] = {}
    for setting in settings:
        step = predict_workers(state, value_of(setting)) if state is not None and name_of(setting) == WORKERS else None
        if step is not None and step.ratio is not None and step.low is not None and step.high is not None:
            found[setting] = RatioRange(ratio=step.ratio, low=step.low, high=step.high)
    return found
