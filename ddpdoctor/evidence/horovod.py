"""Horovod's stall inspector: which ranks have not submitted which tensors, while others wait for them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.evidence.natures import numbers
from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import Absent, Operation, Who

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

MOST_RANKS = 4096
_HEADS = ("Missing ranks:", "Stalled ranks:")
_RANK = re.compile(r"(?:^|[\s>:])(?P<rank>\d{1,7}): ?\[(?P<names>[^\]]{1,2000})")
"""What follows: "2: [allreduce.grad_1, allreduce.grad_2 ...]"."""
_OLD = re.compile(r"(?P<name>\S{1,200}) \[missing ranks: ?(?P<ranks>[\d, ]{1,2000})\]")


class HorovodReader:
    """Finds the ranks that the others wait for."""

    name = "Horovod"
    triggers = (b"Missing ranks:", b"Stalled ranks:", b"[missing ranks:")

    def __init__(self) -> None:
        self._open = False

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts of one line."""
        text = line.text
        if "ranks:" in text:
            self._open = text.strip() in _HEADS
            return tuple(_old(line)) if "[missing ranks:" in text else ()
        if not self._open:
            return ()
        # The rank looks like the label of Slurm's tasks, which is off the text by now.
        found = _RANK.search(f"{line.raw_prefix}{text}")
        self._open = found is not None
        return () if found is None else (_absent(int(found["rank"]), found["names"].partition(",")[0], line),)

    def end(self) -> Iterable[Fact]:
        """Return nothing, because no fact needs a second line."""
        return ()


def _old(line: Line) -> Iterator[Absent]:
    for found in _OLD.finditer(line.text):
        for rank in numbers(found["ranks"])[:MOST_RANKS]:
            yield _absent(rank, found["name"], line)


def _absent(rank: int, tensor: str, line: Line) -> Absent:
    operation = Operation(op=quote(tensor).removesuffix(" ..."))
    said = quote(f"{line.raw_prefix}{line.text}")
    return Absent(
        who=Who(rank=rank),
        spot=line.spot(),
        time=line.time,
        said=said,
        operation=operation,
        certain=False,
        expected=True,
    )
