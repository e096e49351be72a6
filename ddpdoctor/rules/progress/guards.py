"""Whether a call is under a condition that another rank went around, according to the source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.findings import Confidence

from .blame import Blame
from .detours import Route, find_detours
from .states import stack_of
from .timeline import line_key
from .turning import NO_LINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.call_log import CallKind
    from ddpdoctor.model.control_flow import ControlFlow
    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.stacks import Frame

    from .blame import Part
    from .states import State


def find_guard(flows: Sequence[ControlFlow], caller: Rank, others: Iterable[Frame | None], *, over: bool) -> int | None:
    """Return the line of the condition around a rank's call, if another rank went around it, else None.

    ``others`` are the known lines of that other rank. If its script is ``over``, it may also have left by a `return`
    above the call; if there is one, the result is None.
    """
    lines = [frame for frame in others if frame is not None]
    for frame in reversed([frame for frame in stack_of(caller) if frame.user]):
        flow = next((flow for flow in flows if flow.file == frame.file), None)
        if flow is None:
            return None
        shared = [line.line for line in lines if (line.file, line.function) == (frame.file, frame.function)]
        if frame.function == "<module>" and not shared:
            return None  # such as the condition on __name__, which holds for every rank
        before = max((line for line in shared if line < frame.line), default=None)
        after = NO_LINE if over else None
        found = find_detours(flow, Route(left_out=frame.line, before=before, failed=False, after=after))
        guards = [detour for detour in found if detour.jump is None and not detour.ends_loop]
        if guards and (len(guards) == len(found) or not shared):
            return guards[-1].condition
        if shared or found:
            return None
    return None


def blame_guarded(
    parts: Sequence[Part], states: Mapping[int, State], flows: Sequence[ControlFlow]
) -> Blame | None:  # fmt: skip
    """Return which of two ranks makes a conditional call that the other never made, or None if that is not clear."""
    if len(parts) != 2:
        return None
    found: dict[int, int] = {}
    for part, other in (parts, parts[::-1]):
        rank, peer = states[part.rank].rank, states[other.rank].rank
        guard = find_guard(flows, rank, stack_of(peer), over=False)
        if guard is not None and not _has_called(peer, part.kind):
            found[part.rank] = guard
    if len(found) != 1:
        return None
    ((blamed, line),) = found.items()
    reason = f"its call stands under the condition at line {line}, and the other rank never made it"
    return Blame(ranks=(blamed,), confidence=Confidence.MEDIUM, reason=reason)


def _has_called(rank: Rank, wanted: CallKind) -> bool:
    log = pack_calls(rank.recent_calls)
    return any(line_key(kind) == line_key(wanted) for kind in log.kinds)
