"""A trial of settings: which are tried, the predicted and the measured effect of each, and one conclusion (DD817)."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.tuning import (
    AGAIN,
    BASE,
    LaunchKind,
    RatioRange,
    RestartPlan,
    ScalingKind,
    ScalingLaunch,
    ScalingRow,
    TrialStop,
    TriedSetting,
    TuneResult,
    TuneVerdict,
)
from ddpdoctor.rules.answers import Answer, found, passed
from ddpdoctor.rules.registry import rule
from ddpdoctor.rules.speed.comparing import LEAST_GAIN, NOISY, is_gain, measure_effect, spread_of
from ddpdoctor.rules.speed.input import predict_workers
from ddpdoctor.rules.speed.predictions import basis_of, predict_setting
from ddpdoctor.rules.speed.reduction import MIB
from ddpdoctor.rules.speed.state import KNOBS as SPEED_KNOBS
from ddpdoctor.rules.speed.state import knob_of, mean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ddpdoctor.model.facts import Job
    from ddpdoctor.model.findings import Place
    from ddpdoctor.model.tuning import PredictedStep, TrialRecord
    from ddpdoctor.rules.speed.state import SpeedState


CAP = "bucket_cap"
ACCUMULATE = "accumulate"
NO_SYNC = "no_sync"
UNREDUCED = "unreduced"
WORKERS = "workers"
THREADS = "threads"
NUMERICS = "changes numerics"

TITLES = {
    AGAIN: "no change (noise)",
    CAP: "bucket_cap_mb={mib}",
    "gradient_as_bucket_view": "gradient_as_bucket_view=True",
    "static_graph": "static_graph=True",
    "find_unused_off": "find_unused_parameters=False",
    "buffers_off": "broadcast_buffers=False",
    ACCUMULATE: "no_sync() over {value} steps",
    NO_SYNC: "no_sync() within a step",
    "bf16_reduction": "reduction in bf16",
    "bf16_autocast": "autocast to bf16",
    UNREDUCED: "no reduction at all",
    WORKERS: "num_workers={value}",
    THREADS: "OMP_NUM_THREADS={value}",
}
# What else a setting changes. One without a note trains the same.
NOTES = {
    ACCUMULATE: "a larger batch: the learning rate may need another value",
    "bf16_reduction": NUMERICS,
    "bf16_autocast": NUMERICS,
    "buffers_off": "each rank keeps its own buffers, such as the running statistics of BatchNorm",
    UNREDUCED: "only for comparison: shows the total cost of the reduction",
}
# Settings that train differently: they are named beside the line to change, and never as that line.
REFUSED_FOR_TRAINING = frozenset({ACCUMULATE, "bf16_reduction", "bf16_autocast"})

# By setting and framework, "" for DDP itself.
KNOBS: dict[str, dict[str, str]] = {
    CAP: SPEED_KNOBS["bucket_cap"],
    "gradient_as_bucket_view": {
        "": "DistributedDataParallel(..., gradient_as_bucket_view=True)",
        "lightning": "DDPStrategy(gradient_as_bucket_view=True)",
        "accelerate": "DistributedDataParallelKwargs(gradient_as_bucket_view=True)",
    },
    "static_graph": {
        "": "DistributedDataParallel(..., static_graph=True)",
        "lightning": "DDPStrategy(static_graph=True)",
        "transformers": "TrainingArguments(ddp_static_graph=True)",
        "accelerate": "DistributedDataParallelKwargs(static_graph=True)",
    },
    "find_unused_off": {
        "": "DistributedDataParallel(..., find_unused_parameters=False)",
        "lightning": 'Trainer(strategy="ddp")',
        "transformers": "TrainingArguments(ddp_find_unused_parameters=False)",
        "accelerate": "DistributedDataParallelKwargs(find_unused_parameters=False)",
    },
    "buffers_off": SPEED_KNOBS["buffers_off"],
    ACCUMULATE: {
        "": "with model.no_sync(): around forward and backward of all but the last of {value} batches",
        "lightning": "Trainer(accumulate_grad_batches={value})",
        "transformers": "TrainingArguments(gradient_accumulation_steps={value})",
        "accelerate": "Accelerator(gradient_accumulation_steps={value}) and accelerator.accumulate(model)",
    },
    NO_SYNC: {
        "": "with model.no_sync(): around forward and backward of all but the last batch before optimizer.step()",
        "accelerate": "with accelerator.accumulate(model): around the step",
    },
    "bf16_reduction": {
        "": "model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        "lightning": "DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook)",
        "accelerate": "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)",
    },
    "bf16_autocast": {
        "": 'with torch.autocast("cuda", dtype=torch.bfloat16): around forward and loss',
        "lightning": 'Trainer(precision="bf16-mixed")',
        "transformers": "TrainingArguments(bf16=True)",
        "accelerate": 'Accelerator(mixed_precision="bf16")',
    },
    WORKERS: {
        "": "DataLoader(num_workers={value}, persistent_workers=True)",
        "transformers": "TrainingArguments(dataloader_num_workers={value}, dataloader_persistent_workers=True)",
    },
    THREADS: {"": "OMP_NUM_THREADS={value}"},
}
SAME_BATCH = 0.05  # Our choice: batches that differ by less are the same. The last one of an epoch is often smaller.
# What no running job can change: the kind of the finding that makes it worth trying, and what that means.
RESTARTED = {
    WORKERS: ("input-bound", "the ranks wait for their data"),
    THREADS: ("cpu-oversubscribed", "the ranks have more threads than cores"),
}


def name_of(setting: str) -> str:
    """Return a setting without its value: "bucket_cap" of "bucket_cap=1048576"."""
    return setting.partition("=")[0]


def value_of(setting: str) -> int:
    """Return the number in a setting: 4 of "workers=4"."""
    return int(setting.partition("=")[2])


def title_of_setting(setting: str) -> str:
    return _filled(TITLES.get(name_of(setting), setting), setting)


def fix_of(setting: str, frameworks: frozenset[str]) -> str:
    """Return the option of the framework in use that makes a setting last; "" if there is none."""
    return _filled(knob_of(KNOBS.get(name_of(setting), {}), frameworks), setting)


def _filled(text: str, setting: str) -> str:
    value = setting.partition("=")[2]
    mib = f"{int(value) / MIB:g}" if value.isdigit() else value
    return text.replace("{mib}", mib).replace("{value}", value)


def launch_of(kind: LaunchKind, ranks: int, trial: TrialRecord, job: Job) -> ScalingLaunch | None:
    """Return what a launch measured, or None if its trial has no result."""
    if not trial.has_result:
        return None
    result = conclude(trial, predictions={})
    ratio = next((row.measured.ratio for row in result.rows if row.setting == UNREDUCED and row.measured), None)
    if ratio is None:
        return None
    known = [median(rank.speed.kept.input_rows) for rank in job.ranks if rank.speed and rank.speed.kept.input_rows]
    # Of each block its own median is taken off, so that a machine that becomes slower does not count.
    blocks = [block for block in trial.blocks if block.setting == UNREDUCED]
    beyond = [time - median(chain(*block.ranks_ms)) for block in blocks for time in chain(*block.ranks_ms)]
    return ScalingLaunch(
        kind=kind,
        ranks=ranks,
        step_ms=result.step_ms,
        unreduced_ms=ratio * result.step_ms,
        rows=mean(known) or None,
        spread_ms=pstdev(beyond) if beyond else 0.0,
        noise=spread_of(result.noise),
    )


def measure_scaling(launches: Sequence[ScalingLaunch]) -> tuple[ScalingRow, ...]:
    """Return the efficiency for each job of several ranks whose baselines were measured, by rising size."""
    alone = next((launch for launch in launches if launch.kind is LaunchKind.ALONE), None)
    shares = {launch.ranks: launch for launch in launches if launch.kind is LaunchKind.SHARE}
    jobs = sorted((launch for launch in launches if launch.kind is LaunchKind.JOB), key=lambda launch: launch.ranks)
    rows = []
    for job in jobs:
        share = shares.get(job.ranks)
        if alone is None or share is None:
            continue
        steps_ms = [alone.step_ms, share.step_ms, job.step_ms]
        kind = ScalingKind.UNKNOWN
        if alone.rows and share.rows and job.rows:
            kind = kind_of(alone.rows, job.rows, job.ranks)
            steps_ms = [alone.step_ms / alone.rows, share.step_ms / share.rows, job.step_ms / job.rows]
        alone_ms, share_ms, job_ms = steps_ms
        communication = min(1.0, job.unreduced_ms / job.step_ms)
        rows.append(ScalingRow(
            ranks=job.ranks,
            kind=kind,
            step_ms=job.step_ms,
            rows=job.rows,
            efficiency=alone_ms / job_ms,
            threads=alone_ms / share_ms,
            contention=share_ms / (job_ms * communication),
            communication=communication,
            noise=max(alone.noise, share.noise, job.noise),
        ))  # fmt: skip
    return tuple(rows)


def kind_of(one_rows: float | None, rows: float | None, ranks: int) -> ScalingKind:
    """Return what stayed the same: the batch of a rank, or the batch of all ranks together."""
    if one_rows is None or rows is None:
        return ScalingKind.UNKNOWN
    for kind, now in ((ScalingKind.WEAK, rows), (ScalingKind.STRONG, rows * ranks)):
        if abs(now - one_rows) <= SAME_BATCH * max(now, one_rows):
            return kind
    return ScalingKind.NEITHER


def plan_restarts(
    trial: TrialRecord, state: SpeedState | None, kinds: Collection[str], only: Collection[str]
) -> RestartPlan | None:
    """Return what to try by restarts after a first launch, or None if nothing calls for them.

    ``kinds`` are those of what the rules of speed found in it, ``only`` names the settings to try; empty: all that fit.
    """
    wanted = [name for name, (cause, _) in RESTARTED.items() if (name in only if only else cause in kinds)]
    fixed = trial.stop in {TrialStop.CANNOT_SWITCH, TrialStop.SEVERAL_MODELS}
    values = [fit for fit in trial.fits if fixed and (not only or name_of(fit) in only)]
    if not wanted and not values:
        return None
    refused: list[tuple[str, str]] = []
    reasons: list[str] = []
    if values:
        several = f"there are {trial.models} models of DistributedDataParallel"
        reason = several if trial.stop is TrialStop.SEVERAL_MODELS else trial.reason
        reasons.append(f"the settings of this job cannot be changed while it runs: {reason}")
    ranks = state.ranks if state is not None else ()
    for name in wanted:
        cause, what = RESTARTED[name]
        reasons.append(f"a running job cannot change its {name}" if only else f"{what} ({cause})")
        if name == WORKERS:
            # The number that is predicted to keep up, else the present one, which is tried with persistent workers.
            predicted = predict_workers(state) if state is not None else None
            count = max(1, min((rank.fetch_times.workers or 0 for rank in ranks if rank.fetch_times), default=0))
            if predicted is not None and predicted.ratio is not None:
                count = value_of(predicted.setting)
            values += [f"{WORKERS}={count}", f"{WORKERS}={2 * count}"]
            continue
        around = [(rank.host, rank.speed.surroundings) for rank in ranks if rank.speed and rank.speed.surroundings]
        if not around:
            refused.append((name, "unknown number of cores"))
            continue
        # If the ranks differ, the ones with most threads count, and the host with most ranks.
        present = max(context.threads for _, context in around)
        most = max(Counter(host for host, _ in around).values())
        share = max(1, min(context.cores for _, context in around) // most)
        if present != share:
            values.append(f"{THREADS}={share}")
        else:
            refused.append((name, f"a rank has {present} already: the cores / the ranks"))
    return RestartPlan(settings=tuple(values), refused=tuple(refused), why="; ".join(reasons))


def predict_restarts(state: SpeedState | None, settings: Iterable[str]) -> dict[str, RatioRange]:
    """Return the predicted step by number of workers, as a ratio to the present one."""
    if state is None:
        return {}
    return _ranges(
        {setting: predict_workers(state, value_of(setting)) for setting in settings if name_of(setting) == WORKERS}
    )


def predict_settings(job: Job, settings: Iterable[str], step_ms: float, reductions: int = 1) -> dict[str, RatioRange]:
    """Return the predicted step by setting, as a ratio to the present one. What cannot be predicted is left out.

    ``reductions`` is the number of reductions in each step under the script's settings.
    """
    if not step_ms:
        return {}
    basis = basis_of(job.ranks, step_ms, reductions=max(1, reductions))
    return _ranges({setting: predict_setting(basis, setting) for setting in settings})


def _ranges(steps: Mapping[str, PredictedStep | None]) -> dict[str, RatioRange]:
    return {
        setting: RatioRange(ratio=step.ratio, low=step.low, high=step.high)
        for setting, step in steps.items()
        if step is not None and step.ratio is not None and step.low is not None and step.high is not None
    }


def conclude(
    *trials: TrialRecord,
    predictions: Mapping[str, RatioRange],
    frameworks: frozenset[str] = frozenset(),
    where: tuple[Place, ...] = (),
    loaders_at: tuple[Place, ...] = (),
) -> TuneResult:
    """Return what trials with results showed: in a running job, by restarts, or first one and then the other.

    Each is compared with its own base. ``where`` is the line where the DDP model is built, ``loaders_at`` the line that
    takes batches from a loader.
    """
    tried = [_trial_rows(trial, predictions) for trial in trials]
    noise = max((ratio for ratio, _ in tried), key=spread_of)
    rows = [row for _, own in tried for row in own]
    gains = [row for row in rows if row.is_gain and name_of(row.setting) != UNREDUCED]
    usable = [row for row in gains if name_of(row.setting) not in REFUSED_FOR_TRAINING]
    others = [row for row in gains if row not in usable]
    best = min(usable, key=_ratio, default=None)
    if best is not None and name_of(best.setting) == WORKERS:
        # More workers take more memory, so the fewest of those that gain about the same are enough.
        limit = _ratio(best) + LEAST_GAIN
        alike = [row for row in usable if name_of(row.setting) == WORKERS and _ratio(row) <= limit]
        best = min(alike, key=lambda row: value_of(row.setting))
    verdict, text = TuneVerdict.NOTHING, "nothing here is worth changing"
    if best is not None and best.measured is not None:
        low, high = 1 - best.measured.high, 1 - best.measured.low
        verdict = TuneVerdict.CHANGE
        text = f"{best.title} makes the step {1 - best.measured.ratio:.0%} shorter ({low:.0%} to {high:.0%})"
    elif spread_of(noise) > NOISY:
        verdict, text = TuneVerdict.NOISY, "too noisy: run again on a quiet machine, or with more rounds"
    if others:
        most = min(others, key=_ratio)
        text += f"; {most.title} makes it {1 - _ratio(most):.0%} shorter, but trains differently ({most.note})"
    if all(row.measured is None or row.setting == AGAIN for row in rows):
        verdict, text = TuneVerdict.NOTHING, "no setting could be tried"
    return TuneResult(
        step_ms=base_step_ms(trials[0]),
        rounds=trials[0].rounds,
        noise=noise,
        rows=tuple(rows),
        verdict=verdict,
        conclusion=text,
        fix=fix_of(best.setting, frameworks) if best is not None else "",
        where={"": (), WORKERS: loaders_at, THREADS: ()}.get(name_of(best.setting) if best is not None else "", where),
    )


def _ratio(row: TriedSetting) -> float:
    return row.measured.ratio if row.measured is not None else 1.0


def _trial_rows(trial: TrialRecord, predictions: Mapping[str, RatioRange]) -> tuple[RatioRange, list[TriedSetting]]:
    """Return the noise, and the rows in the order of the table."""
    times, refused = _step_times(trial), dict(trial.refused)
    noise = _effect(times, AGAIN)
    rows = []
    for setting in dict.fromkeys((*trial.settings, *trial.late, *refused)):
        if setting == BASE:
            continue
        rounds = len(times[BASE].keys() & times.get(setting, {}).keys())
        reason = refused.get(setting, "")
        if not reason and rounds < trial.rounds:
            reason = trial.reason or "the job ended while it was tried"
        effect = None if reason else _effect(times, setting)
        rows.append(TriedSetting(
            setting=setting,
            title=title_of_setting(setting),
            note=NOTES.get(name_of(setting), ""),
            rounds=rounds,
            predicted=predictions.get(setting),
            measured=effect,
            reason=reason,
            is_gain=setting != AGAIN and effect is not None and is_gain(effect, noise),
            by_restarts=trial.by_restarts,
        ))  # fmt: skip
    return noise, rows


def base_step_ms(trial: TrialRecord) -> float:
    """Return the median step under the script's settings; 0 if there is none."""
    times = _step_times(trial).get(BASE, {})
    return median(times.values()) if times else 0.0


def _step_times(trial: TrialRecord) -> dict[str, dict[int, float]]:
    times: dict[str, dict[int, float]] = {}
    for block in trial.blocks:
        slowest_ms: list[float] = [max(step) for step in zip(*block.ranks_ms, strict=True)]
        # With accumulation the steps differ, so that their mean counts.
        is_mean = name_of(block.setting) == ACCUMULATE
        times.setdefault(block.setting, {})[block.round] = fmean(slowest_ms) if is_mean else median(slowest_ms)
    return times


def _effect(times: Mapping[str, Mapping[int, float]], setting: str) -> RatioRange:
    base, tried = times[BASE], times[setting]
    rounds = sorted(base.keys() & tried.keys())
    return measure_effect([tried[number] for number in rounds], [base[number] for number in rounds])


@rule("DD817", "noisy-trial", Severity.INFO, "The machine is too noisy to measure what a setting gains")
def check_noise(result: TuneResult) -> Answer:
    """Report a trial in which the script's own settings differ from themselves by more than the effects looked for."""
    noise = result.noise
    seen = f"the script's settings against themselves: {noise.low - 1:+.0%} to {noise.high - 1:+.0%}"
    if result.verdict is not TuneVerdict.NOISY or spread_of(noise) <= NOISY:
        return passed(seen)
    return found(
        "step times differ too much between rounds to measure what a setting gains",
        evidence=(f"{seen} (95% interval)", f"this noise hides effects of {NOISY:.0%}"),
        fix="run it again on a quiet machine, or with more rounds (--rounds)",
    )
