"""Decodes ``Report.data`` of `allreduce-bench` to the dataclasses of the model, for all output formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import (
    Advice,
    Arrival,
    BenchSettings,
    Comparison,
    Curve,
    Ending,
    LeftOut,
    Measurement,
    Member,
    NcclLog,
    NodeResult,
    Pair,
    Reason,
    Stop,
)
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report

VERB = "allreduce-bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """The data of a report of this command that the formats use."""

    settings: BenchSettings
    members: tuple[Member, ...]
    results: tuple[Measurement, ...]
    curves: tuple[Curve, ...]
    arrivals: tuple[Arrival, ...]
    pairs: tuple[Pair, ...]
    nodes: tuple[NodeResult, ...]
    left_out: tuple[LeftOut, ...]
    nccl_logs: tuple[NcclLog, ...]
    comparison: Comparison | None
    advice: Advice | None
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    stop: Stop | None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts, sorted by lowest rank."""
        return tuple(dict.fromkeys(member.host for member in self.members))

    @property
    def ending(self) -> Ending:
        """How the bench ended."""
        return Ending.FINISHED if self.stop is None else self.stop.ending


def read_bandwidth(report: Report) -> Bandwidth:
    """Decode the data of a report. Raises ``UserError`` if it is damaged or of another command."""
    if "results" not in report.data:
        raise UserError(f"this is not a report of `ddpdoctor {VERB}`", help="Only its runs have measured bandwidths.")
    try:
        return decode(Bandwidth, report.data)
    except WrongValue as error:
        raise UserError(
            f"the report cannot be read: data.{error}", help="The file is damaged: measure again."
        ) from error
