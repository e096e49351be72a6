"""Files of fingerprints as ranks write them, for tests that compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.collect.fingerprint_files import Writer
from ddpdoctor.model.consistency import Consistency, Stream
from ddpdoctor.recorder.storage.fingerprint_file import FingerprintWriter

TICKS = 7


def row(name: str, what: str = "p", part: str = "", shape: Sequence[int] = (4,), dtype: str = "float32") -> list[Any]:
    return [what, name, part, list(shape), dtype]


def fingerprint_of(content: object) -> bytes:
    """Stand for the checksum of a tensor: 16 bytes, zeros for None."""
    return bytes(16) if content is None else f"{content}".encode().rjust(16, b"x")[-16:]


class FakeRank:
    """One rank that writes fingerprints; its pid is 100 and its rank, unless set otherwise."""

    def __init__(self, folder: Path, rank: int, ranks: Sequence[int], pid: int | None = None) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.pid = 100 + rank if pid is None else pid
        self.files = 0
        self.writer: FingerprintWriter | None = None
        folder.parent.mkdir(parents=True, exist_ok=True)

    def open(self, names: Sequence[Any], **table: Any) -> FakeRank:
        """Begin a file; names stand for parameters, lists for rows."""
        rows = [row(name) if isinstance(name, str) else name for name in names]
        about = {"clock": "step", "group": "0", "ranks": list(self.ranks), "model": 1, "optimizer": 1}
        about |= {"rank": self.rank, "rows": rows} | table
        name = f"{self.pid}-{TICKS}-{self.files}.prints"
        self.files += 1
        self.writer = FingerprintWriter(str(self.folder), name, about, self.pid, TICKS)
        return self

    def write(self, number: int, *contents: object, **text: Any) -> None:
        assert self.writer is not None
        text = {"steps": number, "reductions": number, "forwards": 1} | text
        self.writer.write(number, text, b"".join(map(fingerprint_of, contents)))

    def process(self, began_ns: int = 0, ended_ns: int | None = None) -> Writer:
        return Writer(pid=self.pid, ticks=TICKS, began_ns=began_ns, ended_ns=ended_ns)


def write_job(folder: Path, steps: Mapping[int, Sequence[Sequence[object]]], names: Sequence[Any]) -> list[FakeRank]:
    """Write what each rank had at each step: ``{number: [contents of rank 0, contents of rank 1, ...]}``."""
    count = len(next(iter(steps.values())))
    ranks = [FakeRank(folder, rank, range(count)).open(names) for rank in range(count)]
    for number, by_rank in steps.items():
        for rank, contents in zip(ranks, by_rank, strict=True):
            rank.write(number, *contents)
    return ranks


def only_stream(found: Consistency) -> Stream:
    (stream,) = found.streams
    return stream
