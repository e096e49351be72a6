"""DD505: optimizer state or settings differ between ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, skipped
from ddpdoctor.rules.consistency.parameter_causes import (
    MAX_SETTINGS,
    SAME_SETTINGS,
    or_unseen,
    splits_of,
    state_follows_parameters,
    to_see_each,
    why_parameters_differ,
)
from ddpdoctor.rules.consistency.problems import WHO_IS_UNKNOWN, DriftCause, Ground, hosts_of, model_words, problems_of
from ddpdoctor.rules.consistency.replicas import all_values, is_aligned, replicas_of, sightings
from ddpdoctor.rules.consistency.survey import excuse_of_model, ruling, survey
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.consistency.replicas import ReplicaStreams, Sighting

FOLLOWS = "follows"
"""Name of the cause that state differs because gradients or parameters differed earlier."""


@rule(
    "DD505",
    "optimizer-drift",
    Severity.ERROR,
    "Optimizer state or settings differ between ranks",
    after=("param-drift",),
)
def check_optimizers(job: Job) -> Answer:
    """Report optimizers whose state or settings differ between ranks, even if the parameters are still equal."""
    seen = survey(job, What.STATE, _why_state_differs)
    counted = [found for found in seen.found if found.cause.name != FOLLOWS]
    settings = [found for replica in replicas_of(job) if (found := _first_settings(job, replica)) is not None]
    settings.sort(key=lambda found: found.step or 0)
    findings = [*settings[:1], *problems_of(job, counted, "optimizer states")]
    if not findings and seen.found:
        return skipped(seen.found[0].cause.words)
    compared = seen.compared or any(_compares_settings(replica) for replica in replicas_of(job))
    return ruling(job, replace(seen, compared=compared), findings, "optimizers")


def _why_state_differs(sighting: Sighting) -> DriftCause:
    for what, code in ((What.GRADIENT, "DD503"), (What.PARAMETER, "DD501")):
        earlier = next((one for one in sightings(sighting.replica, what) if one.step <= sighting.step), None)
        if earlier is not None and (what is What.GRADIENT or _follows_parameters(sighting, earlier)):
            return DriftCause(name=FOLLOWS, words=f"this follows from an earlier difference: see {code}", fix="")
    return DriftCause(
        name="state",
        words="with equal gradients, so it was loaded or changed on some ranks only"
        f"{or_unseen(sighting)}: parameters will diverge too",
        fix=f"load the optimizer state on all ranks from the same file{to_see_each(sighting)}",
    )


def _follows_parameters(sighting: Sighting, of_parameters: Sighting) -> bool:
    """Return whether state had to differ because parameters do: through unreduced gradients or weight decay."""
    return why_parameters_differ(of_parameters).unsynchronized or state_follows_parameters(sighting.values)


def _first_settings(job: Job, replica: ReplicaStreams) -> Problem | None:
    """Report the first step at which settings were seen to differ."""
    if excuse_of_model(replica, What.PARAMETER):
        return None
    streams = [stream for stream in replica.streams if stream.clock is StreamClock.STEP]
    last_good = None
    for step, values in sorted((at for stream in streams for at in stream.values), key=lambda at: at[0]):
        if any(each.join for each in values) or not is_aligned(values):
            continue
        splits = splits_of(values)
        if not splits:
            last_good = step
            continue
        blame, optimizer = splits[0].blame, values[0].optimizer or "the optimizer"
        different = "; ".join(split.words for split in splits[:MAX_SETTINGS])
        return Problem(
            confidence=blame.confidence,
            ranks=blame.ranks,
            hosts=hosts_of(job, blame.ranks),
            step=step,
            summary=f"the settings of {optimizer} differ between {rank_list(replica.members)} at step {step}: "
            f"{different}",
            evidence=(
                *([f"equal at step {last_good}"] if last_good is not None else []),
                *([WHO_IS_UNKNOWN] if blame.ground is Ground.NONE else []),
                *model_words(job, replica),
            ),
            fix=SAME_SETTINGS,
        )
    return None


def _compares_settings(replica: ReplicaStreams) -> bool:
    has_settings = any(each.settings for each in all_values(stream for stream in replica.streams if stream.compared))
    return has_settings and not excuse_of_model(replica, What.PARAMETER)
