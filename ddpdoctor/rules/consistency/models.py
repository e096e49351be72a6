"""DD506: the ranks of one group give DDP different models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import grouped, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.calls import find_difference
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.progress.states import places
from ddpdoctor.rules.progress.waits import group_table, group_words
from ddpdoctor.rules.registry import also, rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.facts import Job, TensorSeen
    from ddpdoctor.rules.progress.calls import ModelDifference


@rule("DD506", "model-differs", Severity.ERROR, "Ranks of one group passed different models to DDP")
def check_models(job: JobState) -> Answer:
    """Report a model that is not the same on all ranks that DDP keeps equal: parameters, buffers or their order."""
    difference = job.difference
    if difference is None:
        return passed()
    certain = job.cause is Cause.MODEL and job.stands_still(())
    more = [
        *say.cascade_words(job.failures, ()),
        *say.others(job, [failure.rank.rank for failure in job.failures]),
    ]
    hosts = say.hosts_of(job, difference.blamed)
    return judged([models_problem(difference, job.world, hosts, more)], certain=certain)


@also("DD506")
def check_built_models(job: Job) -> Answer:
    """Compare the models that ranks built, whether or not they reached DDP's constructor."""
    world = len(job.ranks)
    difference = find_difference(job.ranks, group_table(job), world)
    if difference is None:
        return passed()
    hosts = {rank.host for rank in job.ranks}
    blamed = tuple(dict.fromkeys(rank.host for rank in job.ranks if rank.rank in difference.blamed))
    return judged([models_problem(difference, world, blamed if len(hosts) > 1 else ())])


def models_problem(
    difference: ModelDifference, world: int, hosts: tuple[str, ...], more: Iterable[str] = ()
) -> Problem:
    """Return the finding for models that differ; ``more`` is further evidence about the job."""
    blamed = difference.blamed
    sites = {n: difference.models[n].site for n in blamed}
    return Problem(
        confidence=Confidence.HIGH if len(blamed) < len(difference.models) else Confidence.MEDIUM,
        ranks=blamed,
        hosts=hosts,
        where=tuple(place for n, site in sites.items() for place in places(n, [site])),
        tensor=difference.tensor,
        summary=_summary(difference),
        evidence=(
            f"DDP model {difference.number} in {group_words(difference.group, world)}",
            *_counts(difference),
            *more,
        ),
        fix="build the model with the same arguments in the same order on all ranks",
    )


def _summary(difference: ModelDifference) -> str:
    blamed = difference.blamed
    rest = [n for n in sorted(difference.models) if n not in set(blamed)]
    if difference.tensor is None:
        return f"{rank_list(blamed)} passed another model to DDP than the other ranks"
    where = f", but {_sides_words(difference, rest)}" if rest else ""
    return f"the ranks' DDP models differ at {difference.tensor}: {_sides_words(difference, blamed)}{where}"


def _sides_words(difference: ModelDifference, numbers: Iterable[int]) -> str:
    """Return what each rank has at the first difference."""
    return ", ".join(_have({n: _row_words(difference.rows[n]) for n in numbers}))


def _have(what: Mapping[int, str]) -> list[str]:
    """Return "rank 2 has ..." for each of the first few different values, with all ranks that have it."""
    sides = list(grouped((words, number) for number, words in what.items()).items())[: say.MAX_CLASSES]
    return [f"{rank_list(ranks)} {verb(ranks, 'has', 'have')} {words}" for words, ranks in sides]


def _row_words(tensor: TensorSeen | None) -> str:
    if tensor is None:
        return "no such tensor"
    shape = "no shape yet" if tensor.shape is None else f"{tensor.dtype}{list(tensor.shape)}"
    kind = "buffer" if tensor.is_buffer else f"requires_grad={tensor.requires_grad}"
    return f"{tensor.name} of {shape}, {kind}"


def _counts(difference: ModelDifference) -> list[str]:
    """Return how many parameters and buffers the models have, if the counts differ."""
    have = _have({n: f"{model.count} parameters and buffers" for n, model in sorted(difference.models.items())})
    return have if len(have) > 1 else []
