"""Lines with which launchers and libraries begin. In a log that holds several runs, the next one begins there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Launched

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

_AGENTS = (
    "Setting OMP_NUM_THREADS environment variable for each process",  # torchrun
    "Starting elastic_operator with launch configs",  # torchrun
)
_BEGINNINGS = (*_AGENTS, "Initializing distributed: GLOBAL_RANK: 0")  # the last one is Lightning's
_RAS = " compiled with CUDA"
"""Each report of NCCL's RAS begins with the version as well, and no job begins there."""
_NCCL = "NCCL version "
"""NCCL's first line in a job begins with it. Errors of NCCL have it in their middle."""
_RESTART = "will restart worker group"  # torchrun


def begins_run(text: str) -> bool:
    """Return whether the ranks are started with this line, for the first time or again.

    What a reader has held back belongs before it.
    """
    return _RESTART in text or _begins(text)


def _begins(text: str) -> bool:
    if _NCCL in text and _RAS not in text and (text.startswith(_NCCL) or f"NCCL INFO {_NCCL}" in text):
        return True
    return any(words in text for words in _BEGINNINGS)


class LaunchReader:
    """Finds where a job begins."""

    name = "launcher"
    triggers = (b"OMP_NUM_THREADS", b"NCCL version", b"Initializing distributed", b"elastic_operator")

    def read(self, line: Line) -> Iterable[Fact]:
        """Return a fact if a launcher begins with this line."""
        if _begins(line.text):
            several = any(words in line.text for words in _AGENTS)
            return (Launched(who=line.who, spot=line.spot(), time=line.time, starts_several=several),)
        return ()

    def end(self) -> Iterable[Fact]:
        """Return nothing, because no fact needs a second line."""
        return ()
