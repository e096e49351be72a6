"""DD401: a collective returns wrong data."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import format_size, grouped, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.bandwidth.sweeps import name_case
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.bandwidth import Bench, Wrong
    from ddpdoctor.rules.bandwidth.curve import Measured

SHOWN = 8
"""How many wrong elements are named; more would repeat the same."""
FIX = (
    "Do not train on this machine. Look for memory errors (ddpdoctor check-env: DD307, DD308, DD311; dcgmi diag -r "
    "3; a test of the host's memory), and run with another transport (NCCL_P2P_DISABLE=1, NCCL_ALGO=Ring): if the "
    "result stays wrong, the card or the memory is at fault."
)
ROOT = 0
"""The rank that broadcasts, and the target of a reduce."""


@rule(
    "DD401",
    "wrong-data",
    Severity.ERROR,
    "A collective gave wrong data",
    after=("start-trial",),
)
def check_wrong_data(measured: Measured) -> Answer:
    """Report results of collectives that differ from the exact result."""
    bench = measured.bench
    checked = sum(one.wrong is not None for one in bench.results)
    if not bench.wrong:
        if not checked:
            return skipped("no result was checked")
        return judged((), f"the results of {checked} measured cases are correct")
    by_blame: dict[WrongDataBlame, list[Wrong]] = defaultdict(list)
    for wrongs in _by_case(bench.wrong):
        by_blame[find_blame(bench, wrongs)] += wrongs
    return judged(
        [_problem(bench, blame, wrongs) for blame, wrongs in by_blame.items()], f"{len(bench.wrong)} wrong results"
    )


def _by_case(wrongs: Iterable[Wrong]) -> list[list[Wrong]]:
    cases = grouped(((one.collective, one.dtype, one.redop, one.in_place, one.size_bytes), one) for one in wrongs)
    return list(cases.values())


def _problem(bench: Bench, blame: WrongDataBlame, wrongs: list[Wrong]) -> Problem:
    first = min(wrongs, key=lambda one: (one.size_bytes, one.rank))
    more = f", and {len(wrongs) - 1} more wrong results" if len(wrongs) > 1 else ""
    shown = [_element(one) for one in wrongs[:SHOWN]]
    if len(wrongs) > SHOWN:
        shown.append(f"{len(wrongs) - SHOWN} more")
    return Problem(
        summary=f"Wrong data: {_element(first)}{more}.",
        evidence=(*shown, blame.why),
        fix=FIX,
        confidence=blame.confidence,
        ranks=blame.ranks,
        hosts=tuple(dict.fromkeys(member.host for member in bench.members if member.rank in blame.ranks)),
    )


def _element(one: Wrong) -> str:
    others = f" ({one.count} elements are wrong)" if one.count > 1 else ""
    element = f"element {one.index} is {one.found:.17g} instead of {one.expected:.17g}"
    return f"{name_case(one)} of {format_size(one.size_bytes)} on rank {one.rank}: {element}{others}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongDataBlame:
    """The ranks that can be to blame, how sure that is, and why."""

    ranks: tuple[int, ...]
    confidence: Confidence
    why: str


def find_blame(bench: Bench, wrongs: Sequence[Wrong]) -> WrongDataBlame:
    """Return the ranks that can be to blame for the wrong results of one case (at least one result)."""
    world = tuple(sorted(member.rank for member in bench.members))
    collective = wrongs[0].collective
    if collective is Collective.REDUCE:
        return _low(world, "only the root has the result, and all ranks sent data")
    if collective is Collective.BROADCAST:
        return _blame_broadcast(world, wrongs)
    if collective in {Collective.SEND_RECV, Collective.ALL_TO_ALL}:
        return _blame_messages(bench, world, wrongs)
    return _blame_shared(world, wrongs)


def _blame_shared(world: tuple[int, ...], wrongs: Sequence[Wrong]) -> WrongDataBlame:
    """Blame ranks for a result that all ranks compute together: a wrong rank beside right ones made it wrong itself."""
    ranks = _ranks(wrongs)
    if len(ranks) < len(world):
        right = rank_list(set(world) - set(ranks))
        return WrongDataBlame(
            ranks=ranks, confidence=Confidence.HIGH, why=f"the same call gave {right} the correct result"
        )
    alike = len({(one.index, one.found) for one in wrongs}) == 1
    why = "all ranks have the same wrong number, so one of them sent it" if alike else "no rank has the correct result"
    return _low(world, f"{why}: it is unknown which one is at fault")


def _blame_broadcast(world: tuple[int, ...], wrongs: Sequence[Wrong]) -> WrongDataBlame:
    ranks = _ranks(wrongs)
    right = set(world) - set(ranks) - {ROOT}
    if right:
        why = f"{rank_list(right)} received the same data correctly"
        return WrongDataBlame(ranks=ranks, confidence=Confidence.MEDIUM, why=why)
    if len(world) > 2:
        why = f"every rank that received data from rank {ROOT} has wrong data"
        return WrongDataBlame(ranks=(ROOT,), confidence=Confidence.MEDIUM, why=why)
    return _low(world, "sender and receiver cannot be distinguished")


def _blame_messages(bench: Bench, world: tuple[int, ...], wrongs: Sequence[Wrong]) -> WrongDataBlame:
    """Blame ranks for messages from one rank to another: the rank that all wrong messages have in common."""
    ends = [{one.rank, _sender(bench, world, one)} for one in wrongs]
    common = set.intersection(*ends)
    if len(ends) > 1 and len(common) == 1:
        why = "it sent or received every wrong message"
        return WrongDataBlame(ranks=tuple(common), confidence=Confidence.MEDIUM, why=why)
    return _low(tuple(sorted(set.union(*ends))), "sender and receiver cannot be distinguished")


def _sender(bench: Bench, world: tuple[int, ...], wrong: Wrong) -> int:
    """Return who sent an element: the previous rank, or for all_to_all the rank whose part of the output it is in."""
    if wrong.collective is Collective.SEND_RECV:
        return world[(world.index(wrong.rank) - 1) % len(world)]
    count = next(
        (one.count for one in bench.results if (one.size_bytes, one.dtype) == (wrong.size_bytes, wrong.dtype)), 0
    )
    return world[min(wrong.index * len(world) // count, len(world) - 1)] if count else wrong.rank


def _low(ranks: tuple[int, ...], why: str) -> WrongDataBlame:
    return WrongDataBlame(ranks=ranks, confidence=Confidence.LOW, why=why)


def _ranks(wrongs: Sequence[Wrong]) -> tuple[int, ...]:
    return tuple(sorted({one.rank for one in wrongs}))
