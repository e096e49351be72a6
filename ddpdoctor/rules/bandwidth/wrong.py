"""DD401: a collective returns wrong data."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size
from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import rule

from .words import name_case
from .wrong_blame import find_blame

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.bandwidth import Bench, Wrong

    from .measured import Measured
    from .wrong_blame import WrongDataBlame

SHOWN = 8
"""How many wrong elements are named; more would repeat the same."""
FIX = (
    "Do not train with this. Look for memory errors (ddpdoctor check-env: DD307, DD308, DD311; dcgmi diag -r 3; a test "
    "of the host's memory), and run with another transport (NCCL_P2P_DISABLE=1, NCCL_ALGO=Ring): what stays wrong "
    "is the card or the memory."
)


@rule(
    "DD401",
    "wrong-data",
    Severity.ERROR,
    "A collective gave data that are not as they have to be",
    after=("start-trial",),
)
def check_wrong_data(measured: Measured) -> Answer:
    """Report results of collectives that differ from the exact result.

    ## What it means

    A rank received numbers that no rank sent, or a sum that is wrong. Training goes on with them, and at best diverges.
    The cause is broken hardware (GPU or host memory, a link without a checksum, a card), or a bug in a driver, in NCCL
    or in a network plugin.

    ## How it is recognised

    In a separate pass, every collective runs at every size and dtype on whole numbers that depend on rank and position,
    and whose sums every dtype holds exactly. Every element is compared. The first wrong element of each rank is
    reported: where it is, what it should be, and what it is.

    If one rank's result is wrong and another rank's is right, the wrong one is to blame: both took part in the same
    call. If all results are wrong, the wrong number may have come from any rank, so all are named, with low confidence.
    For a message from one rank to another, sender and receiver cannot be told apart, unless one rank took part in every
    wrong message.

    ## What else looks like it

    Rounding cannot cause this: the numbers are exact in any order of addition. One software bug is known: Gloo in torch
    2.6 always sums in `reduce_scatter`, whatever `--op` says, so all ranks are wrong in the same way with any operator
    other than `sum`.

    ## What to do

    Take the host out of use. Look at ECC errors and Xid messages (`ddpdoctor check-env`), and run `dcgmi diag -r 3` or
    a memory test. Run once more with another transport (`NCCL_P2P_DISABLE=1`, `NCCL_ALGO=Ring`): if the error stays
    with all of them, the card or its memory is the cause.
    """
    bench = measured.bench
    checked = sum(one.wrong is not None for one in bench.results)
    if not bench.wrong:
        if not checked:
            return skipped("no result was checked")
        return judged((), f"the results of {checked} measured cases are as they have to be")
    by_blame: dict[WrongDataBlame, list[Wrong]] = defaultdict(list)
    for wrongs in _by_case(bench.wrong):
        by_blame[find_blame(bench, wrongs)] += wrongs
    return judged(
        [_problem(bench, blame, wrongs) for blame, wrongs in by_blame.items()], f"{len(bench.wrong)} wrong results"
    )


def _by_case(wrongs: Iterable[Wrong]) -> list[list[Wrong]]:
    cases: dict[tuple[object, ...], list[Wrong]] = defaultdict(list)
    for one in wrongs:
        cases[one.collective, one.dtype, one.redop, one.in_place, one.size_bytes].append(one)
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
