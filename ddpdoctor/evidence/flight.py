"""Reads dumps of torch's flight recorder: pickles of FR 2.1 to 2.10, and JSON; of NCCL, nccl2, Gloo and TorchComms.

The layout is that of FlightRecorderDetail.hpp in torch 2.4 to 2.15. Dumps are files that anybody may have written: the
unpickler looks up no name, so that nothing in a dump can be called, and its memory is limited.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from ddpdoctor.evidence.flight_columns import build_dump
from ddpdoctor.evidence.reader import Found
from ddpdoctor.model.evidence import MOST_RANKS
from ddpdoctor.model.garbage import no_collection
from ddpdoctor.recorder.storage.plain_pickle import parse_cut_pickle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.evidence.reader import Document

MOST_MEMORY = 2**30
"""Our choice: the most that unpickling one dump may add to the memory of the process. 2,000 entries take 10 MiB."""
_KEYS = (b"pg_config", b"entries", b"process_group", b"nccl_comm_state")
_LAST_NUMBER = re.compile(r"(\d+)(?:\.\w+)*$")
"""torch appends the global rank to the prefix that a user may set: "/scratch/fr_12"."""


class FlightPickleReader:
    """Reads the pickles that torch writes when a collective times out, or when its pipe is written to."""

    name = "flight recorder dump"

    def recognizes(self, head: bytes) -> bool:
        """Return whether it is a pickle with the keys of a dump."""
        is_pickle = len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5
        return is_pickle and b"version" in head and any(key in head for key in _KEYS)

    def read(self, document: Document) -> Found:
        """Return the calls that the dump holds. Of a file that is cut off it returns those before the cut."""
        with no_collection():
            return self._read(document)

    def _read(self, document: Document) -> Found:
        problem = "cut off" if document.cut else ""
        try:
            body = _unpickle(document.body)
        except Exception as error:  # noqa: BLE001 - any opcode of a hostile pickle may raise anything
            if isinstance(error, _NamesError):
                return Found(problem="it names Python objects, which no dump does: it was not unpickled further")
            problem = "cut off" if isinstance(error, EOFError | pickle.UnpicklingError) else "damaged"
            try:
                body = parse_cut_pickle(document.body)
            except ValueError as reason:
                return Found(problem=f"{problem}: {reason}")
        return _found(body, document, problem)


class FlightJsonReader:
    """Reads the JSON of ``/handler/fr_trace_json``, ``dump_nccl_trace_json`` and ``_dump_fr_trace_json``."""

    name = "flight recorder dump"

    def recognizes(self, head: bytes) -> bool:
        """Return whether it is a JSON object with the keys of a dump."""
        start = head.lstrip()
        return start.startswith(b"{") and b'"version"' in start and any(b'"' + key + b'"' in start for key in _KEYS)

    def read(self, document: Document) -> Found:
        """Return the calls that the dump holds."""
        try:
            body = json.loads(document.body)
        except (ValueError, RecursionError):
            return Found(problem="cut off" if document.cut or not document.body.rstrip().endswith(b"}") else "damaged")
        return _found(body, document, "")


def _found(body: object, document: Document, problem: str) -> Found:
    rank = document.who.rank
    if rank is None:
        number = _LAST_NUMBER.search(document.source.rpartition("/")[2])
        rank = int(number[1]) if number and len(number[1]) < 8 and int(number[1]) < MOST_RANKS else None
    dump = build_dump(body, rank, document.source, problem) if isinstance(body, dict) else None
    return Found(dumps=[dump] if dump else [], problem=problem or ("" if dump else "not a dump of the flight recorder"))


class _NamesError(pickle.UnpicklingError):
    pass


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain values only: a pickle that names a function or class is refused before anything is looked up."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        """Refuse."""
        raise _NamesError(f"{module}.{name}")


def _unpickle(body: bytes) -> Any:
    with _memory_limit():
        # With peek() the unpickler reads ahead; with read() alone it asks for each opcode.
        return _PlainUnpickler(io.BufferedReader(io.BytesIO(body), len(body))).load()


@contextmanager
def _memory_limit() -> Iterator[None]:
    """Limit the memory of the process: one opcode can ask the unpickler for 64 GiB."""
    try:
        import resource

        with open("/proc/self/statm", "rb") as pages:  # noqa: PTH123 - it is read for each of thousands of dumps
            used = int(pages.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + MOST_MEMORY
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
