"""Tables of nccl-tests: wrong results are a fault, bandwidths are a note."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import Finished, Hint, Trouble

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

_PROGRAM = re.compile(r"# Collective test starting: (?P<name>\w+)")
_HALF = r"\s+[\d.]+\s+(?P<alg{n}>[\d.]+)\s+(?P<bus{n}>[\d.]+)\s+(?P<wrong{n}>N/A|[\d.e+]+)"
_ROW = re.compile(
    r"^\s*(?P<size>\d+)\s+(?P<count>\d+)\s+(?P<type>[a-z]\w*)\s+(?P<redop>\w+)\s+(?:-?\d+)"
    + _HALF.format(n=0)
    + _HALF.format(n=1)
)
_BOUNDS = re.compile(r"# Out of bounds values : (?P<count>\d+) (?P<result>OK|FAILED)")
_AVERAGE = re.compile(r"# Avg bus bandwidth\s*: (?P<busbw>[\d.]+)")


class NcclTestsReader:
    """Reads the tables of all programs of nccl-tests."""

    name = "nccl-tests"
    triggers = (b"# Collective test starting", b"# Using devices", b"# Out of bounds values", b"# Avg bus bandwidth")

    def __init__(self) -> None:
        self._begin("nccl-tests")

    def _begin(self, program: str) -> None:
        self._program = program
        self._best: tuple[float, int] = (0.0, 0)
        self._wrong: tuple[int, Line] | None = None

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts of a table when its last line is read."""
        text = line.text
        if text.startswith("#"):
            return self._comment(line)
        if not text[:1].isspace() or (found := _ROW.match(text)) is None:
            return ()
        size = int(found["size"])
        self._best = max(self._best, *((float(found[half]), size) for half in ("bus0", "bus1")))
        wrong = [found[half] for half in ("wrong0", "wrong1")]
        if self._wrong is None and any(one != "N/A" and float(one) > 0 for one in wrong):
            self._wrong = (size, line)
        return ()

    def end(self) -> Iterable[Fact]:
        """Return the wrong results of a table that the log cuts off."""
        wrong, self._wrong = self._wrong, None
        return () if wrong is None else (_trouble(self._program, f"at {wrong[0]} bytes", wrong[1]),)

    def _comment(self, line: Line) -> Iterable[Fact]:
        text = line.text
        if (found := _PROGRAM.match(text)) is not None:
            facts = tuple(self.end())
            self._begin(found["name"])
            return facts
        if (found := _BOUNDS.match(text)) is not None:
            wrong, self._wrong = self._wrong, None
            where = f"at {wrong[0]} bytes" if wrong is not None else f"{found['count']} times"
            return (_trouble(self._program, where, line),) if found["result"] == "FAILED" or wrong else ()
        if (found := _AVERAGE.match(text)) is not None:
            best = f", at most {self._best[0]:g} at {self._best[1]} bytes" if self._best[1] else ""
            words = f"{self._program}: bus bandwidth {float(found['busbw']):g} GB/s on average{best}"
            common: dict[str, Any] = {"who": line.who, "spot": line.spot(), "said": quote(text)}
            return (Hint(words=words, kind="nccl-tests", **common), Finished(**common))
        return ()


def _trouble(program: str, where: str, line: Line) -> Trouble:
    return Trouble(
        who=line.who, spot=line.spot(), said=quote(line.text), kind="wrong-data",
        problem=f"{program} got wrong results {where}: data are damaged on their way or in memory",
        fix="do not train with this; look for memory errors (`ddpdoctor check-env`, dcgmi diag -r 3), and find the "
        "host with `ddpdoctor allreduce-bench --pairs`; NCCL_P2P_DISABLE=1 and NCCL_ALGO=Ring narrow it down",
    )  # fmt: skip
