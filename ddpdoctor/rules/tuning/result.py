"""What a trial shows: a row for each setting, and one conclusion."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

from ddpdoctor.model.tuning import AGAIN, BASE, RatioRange, TriedSetting, TuneResult, TuneVerdict
from ddpdoctor.rules.speed.comparing import LEAST_GAIN, NOISY, SettingEffect, block_step_s, is_gain, measure_effect

from .settings import (
    ACCUMULATE,
    NOTES,
    REFUSED_FOR_TRAINING,
    THREADS,
    UNREDUCED,
    WORKERS,
    fix_of,
    name_of,
    title_of_setting,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.findings import Place
    from ddpdoctor.model.tuning import TrialRecord, TriedBlock


def conclude(
    *trials: TrialRecord,
    predictions: Mapping[str, RatioRange],
    frameworks: frozenset[str] = frozenset(),
    where: tuple[Place, ...] = (),
    loaders_at: tuple[Place, ...] = (),
) -> TuneResult:
    """Return what a trial with results showed: in a running job, by restarts, or first one and then the other.

    Args:
        trials: Records whose ``has_result`` holds. Each is compared with its own base.
        predictions: By setting, for those that can be predicted.
        frameworks: What trains the model.
        where: The line where the DDP model is built.
        loaders_at: The line that takes batches from a loader.
    """
    noises = [_effect(_step_times(trial), AGAIN) for trial in trials]
    rows = [row for trial, noise in zip(trials, noises, strict=True) for row in _rows(trial, noise, predictions)]
    noise = max(noises, key=lambda one: one.spread)
    best = _best(rows)
    name = name_of(best.setting) if best is not None else ""
    return TuneResult(
        step_ms=base_step_ms(trials[0]),
        rounds=trials[0].rounds,
        noise=_range(noise),
        rows=tuple(rows),
        verdict=_verdict(best, noise) if _has_tried(rows) else TuneVerdict.NOTHING,
        conclusion=_conclusion(best, noise, rows) if _has_tried(rows) else "no setting could be tried",
        fix=fix_of(best.setting, frameworks) if best is not None else "",
        where={"": (), WORKERS: loaders_at, THREADS: ()}.get(name, where),
    )


def _rows(trial: TrialRecord, noise: SettingEffect, predictions: Mapping[str, RatioRange]) -> list[TriedSetting]:
    times = _step_times(trial)
    return [_row(trial, times, setting, noise, predictions) for setting in _tried(trial)]


def base_step_ms(trial: TrialRecord) -> float:
    """Return the median step under the script's settings; 0 if there is none."""
    times = _step_times(trial).get(BASE, {})
    return median(times.values()) if times else 0.0


def _tried(trial: TrialRecord) -> list[str]:
    """Return the settings in the order of the table."""
    known = dict.fromkeys((*trial.settings, *trial.late, *(setting for setting, _ in trial.refused)))
    return [setting for setting in known if setting != BASE]


def _step_times(trial: TrialRecord) -> dict[str, dict[int, float]]:
    """Return the step time of each block, by setting and round."""
    times: dict[str, dict[int, float]] = {}
    for block in trial.blocks:
        times.setdefault(block.setting, {})[block.round] = _block_ms(block)
    return times


def _block_ms(block: TriedBlock) -> float:
    """Return the time of a step of a block. With accumulation the steps differ, so that their mean counts."""
    if name_of(block.setting) == ACCUMULATE:
        return fmean(max(step) for step in zip(*block.ranks_ms, strict=True))
    return block_step_s(block.ranks_ms)


def _effect(times: Mapping[str, Mapping[int, float]], setting: str) -> SettingEffect:
    base, tried = times[BASE], times[setting]
    rounds = sorted(base.keys() & tried.keys())
    return measure_effect([tried[number] for number in rounds], [base[number] for number in rounds])


def _row(
    trial: TrialRecord,
    times: Mapping[str, Mapping[int, float]],
    setting: str,
    noise: SettingEffect,
    predictions: Mapping[str, RatioRange],
) -> TriedSetting:
    rounds = len(times[BASE].keys() & times.get(setting, {}).keys())
    reason = dict(trial.refused).get(setting, "")
    if not reason and rounds < trial.rounds:
        reason = trial.reason or "the job ended while it was tried"
    effect = None if reason else _effect(times, setting)
    return TriedSetting(
        setting=setting,
        title=title_of_setting(setting),
        note=NOTES.get(name_of(setting), ""),
        rounds=rounds,
        predicted=predictions.get(setting),
        measured=None if effect is None else _range(effect),
        reason=reason,
        is_gain=setting != AGAIN and effect is not None and is_gain(effect, noise),
        by_restarts=trial.by_restarts,
    )


def _range(effect: SettingEffect) -> RatioRange:
    return RatioRange(ratio=effect.ratio, low=effect.low, high=effect.high)


def _has_tried(rows: list[TriedSetting]) -> bool:
    return any(row.measured is not None and row.setting != AGAIN for row in rows)


def _best(rows: list[TriedSetting]) -> TriedSetting | None:
    """Return the setting that shortens the step most and trains the same."""
    usable = [row for row in _gains(rows) if name_of(row.setting) not in REFUSED_FOR_TRAINING]
    best = min(usable, key=_ratio, default=None)
    if best is None or name_of(best.setting) != WORKERS:
        return best
    # More workers take more memory, so the fewest of those that gain about the same are enough.
    alike = [row for row in usable if name_of(row.setting) == WORKERS and _ratio(row) <= _ratio(best) + LEAST_GAIN]
    return min(alike, key=lambda row: value_of(row.setting))


def _gains(rows: list[TriedSetting]) -> list[TriedSetting]:
    return [row for row in rows if row.is_gain and name_of(row.setting) != UNREDUCED]


def _ratio(row: TriedSetting) -> float:
    return row.measured.ratio if row.measured is not None else 1.0


def _verdict(best: TriedSetting | None, noise: SettingEffect) -> TuneVerdict:
    if best is not None:
        return TuneVerdict.CHANGE
    return TuneVerdict.NOISY if is_noisy(noise) else TuneVerdict.NOTHING


def is_noisy(noise: SettingEffect | RatioRange) -> bool:
    """Return whether the script's settings against themselves differ so much that effects of 5% cannot be seen."""
    return max(abs(noise.low - 1), abs(noise.high - 1)) > NOISY


def _conclusion(best: TriedSetting | None, noise: SettingEffect, rows: list[TriedSetting]) -> str:
    others = [row for row in _gains(rows) if name_of(row.setting) in REFUSED_FOR_TRAINING]
    if best is not None and best.measured is not None:
        low, high = 1 - best.measured.high, 1 - best.measured.low
        text = f"{best.title} makes the step {1 - best.measured.ratio:.0%} shorter ({low:.0%} to {high:.0%})"
    elif is_noisy(noise):
        text = "too noisy: run again on a quiet machine, or with more rounds"
    else:
        text = "nothing here is worth changing"
    if others:
        most = min(others, key=_ratio)
        text += f"; {most.title} makes it {1 - _ratio(most):.0%} shorter, but trains differently ({most.note})"
    return text
