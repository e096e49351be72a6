"""Reads a saved report of `allreduce-bench` as the baseline for a comparison."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model.bandwidth import Measurement, Member, Settings
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.rules.bandwidth.compare import Baseline

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report

VERB = "allreduce-bench"
Kind = TypeVar("Kind")
_HELP = "Give the report.json, or its folder, of an allreduce-bench that was run with --report-dir or --format json."


def read_baseline(report: Report, name: str) -> Baseline:
    """Return the baseline in a report. ``name`` is the user's argument to --compare. Raises ``UserError``."""
    data = report.data
    if data.get("verb") != VERB:
        raise UserError(f"--compare {name} is no report of allreduce-bench", help=_HELP)
    try:
        baseline = Baseline(
            name=name,
            results=_decode_all(Measurement, data.get("results")),
            members=_decode_all(Member, data.get("members")),
            settings=decode(Settings, data.get("settings")),
        )
    except WrongValue as error:
        raise UserError(f"--compare {name} cannot be read: {error}", help=_HELP) from error
    if not baseline.results:
        raise UserError(f"--compare {name} holds no measurement", help=_HELP)
    times = [time for one in baseline.results for time in (one.p50_low_us, one.p50_us, one.p50_high_us)]
    if not all(0 < time < math.inf for time in times):
        raise UserError(f"--compare {name} holds a time that is none", help=_HELP)
    return baseline


def check_ranks(baseline: Baseline, world_size: int) -> None:
    """Raise ``UserError`` if the baseline has another number of ranks, because then its data volumes differ."""
    ranks = len(baseline.members)
    if ranks != world_size:
        raise UserError(
            f"--compare {baseline.name} is a run of {ranks} {'rank' if ranks == 1 else 'ranks'}, and this one has "
            f"{world_size}",
            help="Compare runs of as many ranks.",
        )


def _decode_all(kind: type[Kind], plain: Any) -> tuple[Kind, ...]:
    if not isinstance(plain, list):
        raise WrongValue("a list was expected")
    return tuple(decode(kind, one) for one in plain)
