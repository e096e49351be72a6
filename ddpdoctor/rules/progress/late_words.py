"""DD601 of a rank that came too late: the others had waited for as long as torch lets them, and failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.rules.answers import Problem

from . import evidence as say
from .busy import busy_fix
from .late import lines_before
from .limits import limit_words, limits_of, long_words
from .places import places
from .words import call_words, line_of, place_words

if TYPE_CHECKING:
    from .scene import Scene


def tell_late(scene: Scene, late: tuple[int, ...]) -> Problem:
    """Return the finding: where the late ranks were meanwhile, and how long the others had waited."""
    frames = {n: lines_before(scene, n) or (say.line_at(scene.states[n]),) for n in late}
    where = tuple(place for n in late for place in places(n, frames[n]))
    waiters = [failure for failure in scene.failures if failure.rank.rank not in late]
    first = waiters[0]
    limit_s = limits_of(scene).get(first.rank.rank)
    gone = f"after {long_words(limit_s)}" if limit_s is not None else "after torch's own time limit"
    who = rank_list(failure.rank.rank for failure in waiters)
    known = lines_before(scene, late[0])
    was = f"; until then it was {place_words(known[0])}" if known and len(late) == 1 else ""
    op = first.call.op if first.call is not None else "the call"
    calls = [(n, scene.states[n].call) for n in late]
    return Problem(
        confidence=Confidence.HIGH if known else Confidence.MEDIUM,
        ranks=late,
        hosts=say.hosts_of(scene, late),
        where=where,
        step=say.step_of(scene, late),
        summary=f"{say.who(scene, late)} came to {op} when {who} had given up waiting there {gone}{was}",
        evidence=(
            *(
                f"rank {n} called {call_words(call)} at {line_of(call.site)}, "
                f"{(call.started_ns - first.call.started_ns) / 1e9:.1f} s after rank {first.rank.rank}"
                for n, call in calls
                if call is not None and first.call is not None
            ),
            *limit_words(scene),
            *say.cascade_words(scene.failures, late),
        ),
        fix=busy_fix(scene),
    )
