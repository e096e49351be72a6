"""Which job of ``jobs/speed`` loses time for which reason, and which of them look alike and lose none."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scenarios.running import JOBS, PATIENT, Ran, numbers, rows_of, run


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What must be found."""

    kind: str
    ranks: tuple[int, ...]
    also: tuple[str, ...]
    """Kinds that are as true."""
    says: str
    """A word that the evidence or the fix must have."""


FAULTS = {
    case: Fault(kind=kind, says=says, also=tuple(also.split()), ranks=numbers(ranks or "0 1"))
    for case, kind, says, also, ranks in rows_of("slow")
}
HEALTHY = [case for (case,) in rows_of("quick")]
NOT_THAT = {"communication accumulated": "accumulation-sync"}
"""Jobs that are slow for another reason than the one that they look like."""
NOT_KEPT = {
    "input_bound behind", "straggler reads", "data_parallel inside", "by_hand copies", "by_hand over_rank_0",
    "periodic_stall epochs", "quiet pauses",
}  # fmt: skip
"""They wait for a quiet machine to be recorded on: until then they are run by night only."""


def run_way(case: str, folder: Path) -> Ran:
    """Run a job of ``jobs/speed`` in one of its ways."""
    job, way = case.split()
    return run(f"speed/{job}", folder, "--speed", *PATIENT, ranks=2, args=(way,))


def fault_lines(case: str) -> set[int]:
    """Return the lines that are at fault in one way of a job. A mark names ways; without names it is for all."""
    job, way = case.split()
    lines = (JOBS / "speed" / f"{job}.py").read_text().splitlines()
    marks = {number: line.partition("# FAULT")[2].split() for number, line in enumerate(lines, 1) if "# FAULT" in line}
    return {number for number, ways in marks.items() if not ways or way in ways}


def named_lines(verdict: dict[str, Any], case: str) -> set[int]:
    """Return the lines of the job that a verdict names."""
    name = f"{case.partition(' ')[0]}.py"
    return {place["line"] for place in verdict["where"] if Path(place["file"]).name == name}
