"""Phrases and places that several rules of speed use."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.findings import Place
from ddpdoctor.model.steps import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable

    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.stacks import Frame

    from .state import SpeedState

MIN_STEP_MS = 10.0
"""Below this step, communication is the latency of a toy job, and no setting changes it: the issue's figure."""
QUICK = 0.1
"""A job is as quick as the fastest tenth of its steps. Our choice: on a busy machine the others wait for cores."""
OFTEN = 0.25
"""A line is named if it was sampled this often, compared with the most frequent one: DD610's figure."""
MAKING = frozenset({"__getitem__", "__getitems__", "__iter__", "__next__"})
"""Functions of a script's dataset that the loader calls in the rank itself, without workers."""
HOST_PHASES = frozenset({Phase.BEFORE, Phase.BETWEEN})
"""Outside forward and backward."""
SHARE = 0.1
"""Share of the step that a cause must take to be worth a finding: TraceML's warning."""


def percent(share: float) -> str:
    """Return a share of the step: "31 %"."""
    return f"{share:.0%}"


def ms(value: float) -> str:
    """Return a time: "12.3 ms"."""
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def up_to(share: float, *, of: str = "step") -> str:
    """Return what a fix recovers at most."""
    return f"up to {share:.0%} of the {of}"


def is_small(state: SpeedState) -> str:
    """Return why a job is too small to judge its communication, or "" if it is not."""
    walls = sorted(state.steps.walls_ms)
    wall = walls[int(QUICK * len(walls))]
    return (
        f"a step takes {ms(wall)}, less than {MIN_STEP_MS:.0f} ms: call latency dominates" if wall < MIN_STEP_MS else ""
    )


def call_places(state: SpeedState, ops: Container[str]) -> tuple[Place, ...]:
    """Return for each rank the line that makes most calls of these operations."""
    return _each(state, lambda rank: call_site(rank, ops))


def model_places(state: SpeedState) -> tuple[Place, ...]:
    """Return for each rank the line that wrapped its model in DDP."""
    return _each(state, lambda rank: next((model.site for model in rank.models if model.site is not None), None))


def _each(state: SpeedState, find: Callable[[Rank], Frame | None]) -> tuple[Place, ...]:
    found = ((rank.rank, find(rank)) for rank in state.ranks)
    return tuple(place(number, frame) for number, frame in found if frame is not None)


def call_site(rank: Rank, ops: Container[str]) -> Frame | None:
    """Return the line that makes most calls of these operations on a rank, or None if none is recorded."""
    log = pack_calls(rank.recent_calls)
    sites = Counter(call.site for call in log.of_kinds(lambda kind: kind.op in ops) if call.site is not None)
    return sites.most_common(1)[0][0] if sites else None


def place(rank: int, frame: Frame) -> Place:
    """Return a frame as a rank's place."""
    return Place(rank=rank, file=frame.file, line=frame.line, function=frame.function)


def host_lines(rank: Rank, others: Iterable[Rank] = (), phases: Collection[Phase] = HOST_PHASES) -> tuple[Frame, ...]:
    """Return up to two lines at which a rank was sampled outside forward and backward, more often than the others.

    A line that calls a model, as in an evaluation, comes before the line in the model. With ``phases`` it is lines of
    these phases. In forward every line is below one that calls the model, so such lines are left out there.
    """
    compared = list(others)
    usual = Counter[object]()
    for other in compared:
        usual.update(_samples(other, phases))
    own = _samples(rank, phases)
    beyond = {line: times - usual[line] / max(1, len(compared)) for line, times in own.items()}
    most = max(beyond.values(), default=0.0)
    often = [line for line, times in beyond.items() if times > 0 and times >= OFTEN * most]
    often.sort(key=lambda line: (not line[1], -beyond[line]))
    return tuple(dict.fromkeys(frame for frame, _ in often))[:2]


def making_line(rank: Rank, loader: tuple[str, int] | None) -> Frame | None:
    """Return the line at which a rank's batches are made: in its workers, or in its own loader; None if not seen.

    ``loader`` is the line that takes batches. An idle forked worker still has it on its stack. A spawned worker first
    runs the script's module, which makes no batch.
    """
    found: Counter[Frame] = Counter()
    for line in rank.lines_seen:
        frame = line.frame
        if (frame.file, frame.line) == loader or frame.function == "<module>" or line.calls_module:
            continue
        if line.in_child or frame.function in MAKING:
            found[frame] += line.times
    return found.most_common(1)[0][0] if found else None


def _samples(rank: Rank, phases: Collection[Phase]) -> Counter[tuple[Frame, bool]]:
    """Return how often a rank was sampled at each line in these phases, and whether it called a model there."""
    found: Counter[tuple[Frame, bool]] = Counter()
    for line in rank.lines_seen:
        is_outside = line.phase in HOST_PHASES
        if line.phase in phases and not line.in_child and (is_outside or not line.calls_module):
            found[line.frame, line.calls_module] += line.times
    return found
