"""A rank that holds the others up because it works: it computes, reads, writes, receives, or waits for a busy child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.rules.progress.words import file_name, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.facts import ProcessCauses, Rank, Work

    from ddpdoctor.rules.progress.job_state import JobState

BUSY_CORES = 0.3
"""Our choice: a computing rank gets more than this share of a core, even if the machine has other work too."""
BUSY_WANTED = 0.5
"""Our choice: a thread that polls with short sleeps wants a core for less of the time than this, however crowded the
machine is."""
BUSY_BYTES_S = 64 * 1024
"""The same limit as for progress (``launch.progress``): a loop that polls a small file stays below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """What a rank does."""

    said: str
    """The text after "rank 0:": "has used 97% of a core for 30 s", "its child gcc (process 77) uses 100% of a core"."""
    may_spin: bool
    """Only its CPU time is known, and an endless loop uses CPU time too."""
    by_child: bool
    """A child does the work; ``said`` names it."""

    @property
    def sentence(self) -> str:
        """The same text with a subject."""
        return self.said if self.by_child else f"it {self.said}"

    @property
    def clue(self) -> str:
        """The text that serves as evidence."""
        return self.said + (": it is computing, or spinning in a loop that waits" if self.may_spin else "")


def find_work(job: JobState, number: int) -> Busy | None:
    """Return what a rank works at, or None if it does not work or that is not known."""
    rank = job.rank(number)
    causes = rank.causes
    if causes is None or causes.work is None:
        return None
    own, childs = next(_moves(causes, causes.work), None), next(_children(causes), None)
    said = own or childs or _computes(job, rank, causes.work)
    if said is None:
        return None
    return Busy(said=said, may_spin=not (own or childs), by_child=own is None and childs is not None)


def _moves(causes: ProcessCauses, work: Work) -> Iterator[str]:
    """Say which bytes the rank moves, the surest evidence first."""
    file = causes.blocked.file if causes.blocked is not None else None
    where = f" {file_name(file)}" if file and file.startswith("/") else ""
    if causes.receiving is not None and causes.receiving.bytes_s >= BUSY_BYTES_S:
        yield f"receives {_rate(causes.receiving.bytes_s)} from {causes.receiving.remote}"
    if (work.written_bytes_s or 0) >= BUSY_BYTES_S:
        yield f"writes {_rate(work.written_bytes_s)}{f' to{where}' if where else ''}"
    if (work.read_bytes_s or 0) >= BUSY_BYTES_S:
        yield f"reads {_rate(work.read_bytes_s)}{f' from{where}' if where else ''}"


def _children(causes: ProcessCauses) -> Iterator[str]:
    for child in causes.working_children:
        who = f"its child {child.name} (process {child.pid})"
        work = child.work
        if _is_computing(work):
            yield f"{who} {_core_words(work)} of a core"
        elif (work.written_bytes_s or 0) >= BUSY_BYTES_S:
            yield f"{who} writes {_rate(work.written_bytes_s)}"
        elif (work.read_bytes_s or 0) >= BUSY_BYTES_S:
            yield f"{who} reads {_rate(work.read_bytes_s)}"


def _computes(job: JobState, rank: Rank, work: Work) -> str | None:
    if not _is_computing(work):
        return None
    since = seconds(job.time_ns - rank.last_progress_ns) if rank.last_progress_ns is not None else ""
    if (rank.cpu_share or 0) >= BUSY_CORES and since:
        return f"has used {rank.cpu_share:.0%} of a core {since}"
    return f"{_core_words(work)} of a core"


def _is_computing(work: Work) -> bool:
    return work.cores >= BUSY_CORES or (work.wanted or 0) >= BUSY_WANTED


def _core_words(work: Work) -> str:
    """Return "uses 97%"; on a crowded machine that gives it little CPU time, also say how much it wants."""
    if work.cores >= BUSY_CORES or work.wanted is None:
        return f"uses {work.cores:.0%}"
    return f"wants {work.wanted:.0%} but gets {work.cores:.0%}"


def _rate(bytes_s: float | None) -> str:
    value = bytes_s or 0.0
    if value >= 1e9:
        return f"{value / 1e9:.1f} GB/s"
    return f"{value / 1e6:.0f} MB/s" if value >= 1e7 else f"{value / 1e6:.1f} MB/s"
