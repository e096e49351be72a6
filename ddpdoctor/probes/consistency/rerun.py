"""Whether a second run with the same seed gives the same bits on each rank, and where it first differs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.trial import Rerun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.probes.consistency.moments import Moment, Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """One rank's record of one run."""

    built: tuple[Seen, ...]
    """Parameters and buffers before the first step."""
    moments: tuple[Moment, ...]


def compare_runs(first: Own, second: Own, rank: int) -> Rerun:
    """Return where two runs of one rank first differ: in the built model, in a batch, or in a step."""
    steps = len(second.moments)
    pairs = [(0, first.built, second.built)]
    for former, latter in zip(first.moments, second.moments, strict=False):
        if former.batch != latter.batch:
            return Rerun(steps=steps, step=former.step, name="the batch", ranks=(rank,))
        pairs.append((former.step, former.tensors, latter.tensors))
    for step, one, other in pairs:
        known = {(seen.what, seen.name, seen.part): seen for seen in one}
        differing = [seen for seen in other if known.get((seen.what, seen.name, seen.part)) != seen]
        if differing:
            what = differing[0]
            return Rerun(
                steps=steps,
                step=step,
                what=what.what,
                name=what.name,
                part=what.part,
                ranks=(rank,),
                differing=len(differing),
                of=len(other),
            )
    return Rerun(steps=steps)


def merge_reruns(reruns: Sequence[Rerun]) -> Rerun:
    """Return the earliest difference of all ranks, with all ranks that differ at that step."""
    different = [one for one in reruns if one.step is not None]
    if not different:
        return reruns[0]
    first = min(different, key=lambda one: one.step or 0)
    return replace(first, ranks=tuple(n for one in different if one.step == first.step for n in one.ranks))
