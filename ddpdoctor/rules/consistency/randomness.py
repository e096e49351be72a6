"""DD507: all ranks draw the same random numbers while dropout is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.consistency.problems import model_words
from ddpdoctor.rules.consistency.replicas import all_values, replicas_of
from ddpdoctor.rules.consistency.survey import why_nothing
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import Stream
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.consistency.replicas import ReplicaStreams

MIN_COMPARISONS = 2
"""Our choice: ranks that shared a seed only at the start have soon drawn different numbers."""


@rule("DD507", "same-random", Severity.INFO, "All ranks use the same dropout masks")
def check_random_state(job: Job) -> Answer:
    """Note that all ranks have the same random state at all times while the model trains with dropout."""
    everything = [(replica, stream) for replica in replicas_of(job) for stream in replica.streams]
    found = [_finding(job, replica, stream) for replica, stream in everything if _is_same(stream)]
    if found:
        return judged(found[:1])
    asked = any(stream.compared >= MIN_COMPARISONS and _drops_out(stream) for _, stream in everything)
    return passed() if asked else skipped(why_nothing(job, "models that train with dropout"))


def _is_same(stream: Stream) -> bool:
    return MIN_COMPARISONS <= stream.compared == stream.same_random and _drops_out(stream)


def _drops_out(stream: Stream) -> bool:
    return any(values.dropout for values in all_values([stream]))


def _finding(job: Job, replica: ReplicaStreams, stream: Stream) -> Problem:
    return Problem(
        ranks=stream.ranks,
        summary=f"{rank_list(stream.ranks)} have the same random state while the model trains with dropout, so they "
        "use the same dropout masks",
        evidence=(
            f"the random state was equal on all of them in {stream.compared} comparisons",
            *model_words(job, replica),
        ),
        fix="seed each rank differently after you wrap the model: torch.manual_seed(seed + rank)",
    )
