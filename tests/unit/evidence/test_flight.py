"""Dumps of the flight recorder may come from anybody: none raises an error, runs code or takes all memory."""

import pickle
import random
import struct
from typing import Any

import pytest

from ddpdoctor.evidence.dump_choice import choose_dumps
from ddpdoctor.evidence.flight import FlightJsonReader, FlightPickleReader
from ddpdoctor.evidence.reader import Document
from ddpdoctor.rules.evidence.flight import compare_flight
from tests.flight_dumps import recorders

ODD: tuple[Any, ...] = (
    None, True, -1, 2**40, 2**70, 1.5, float("nan"), "", "[0, 1]", [], [[1]], ["a"], {}, {"a": 1}, (), ("0", 1), b"x",
    [[2**70, 2**70]], [["a"]],
)  # fmt: skip


def read(body, name="nccl_trace_rank_0"):
    raw = body if isinstance(body, bytes) else pickle.dumps(body, 2)
    return FlightPickleReader().read(Document(source=name, path=None, body=raw))


def bodies():
    found = recorders(3, {"1/tp": [0, 1]})
    for one in found:
        for _ in range(5):
            one.call()
        if one.rank < 2:
            one.call(group="1/tp").transfer("recv" if one.rank else "send", 1 - one.rank, group="1/tp")
        if one.rank:
            one.call(state="started")
    return [one.body() for one in found]


def spoiled(value, chance, chosen):
    """Return a value of which some parts are replaced, lost or renamed."""
    if chosen.random() < chance:
        return chosen.choice(ODD)
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if chosen.random() > chance / 3}
        return {key: spoiled(one, chance, chosen) for key, one in kept.items()}
    if isinstance(value, list | tuple):
        return type(value)(spoiled(one, chance, chosen) for one in value)
    return value


@pytest.mark.parametrize("chance", [0.002, 0.01, 0.05, 0.2])
def test_a_spoiled_dump_raises_nothing(chance):
    chosen = random.Random(chance)
    whole = bodies()
    for _ in range(100):
        dumps = []
        for rank, body in enumerate(whole):
            raw = pickle.dumps(spoiled(body, chance, chosen), 2)
            cut = raw[: chosen.randrange(len(raw))] if chosen.random() < 0.2 else raw
            dumps += read(cut, f"nccl_trace_rank_{rank}").dumps
        kept, _ = choose_dumps(dumps)
        compare_flight(kept, chosen.choice([None, 3, 4]))


def test_one_opcode_cannot_take_all_memory():
    """LONG_BINPUT with a large index makes CPython's unpickler allocate 64 GiB at once."""
    whole = pickle.dumps(bodies()[0], 2)
    bomb = whole[:2] + b"]r" + struct.pack("<I", 2**32 - 2) + b"0" + whole[2:]
    found = read(bomb)
    assert found.problem.startswith("damaged")


def test_a_rank_comes_from_the_name_or_from_its_transfers():
    body = bodies()[1]
    assert read(body, "fr_7").dumps[0].rank == 7
    assert read(body, "dump").dumps[0].rank == 1


@pytest.mark.parametrize(
    ("head", "is_dump"),
    [(b'{"version": "2.10", "entries": []}', True), (b'{"version": "1", "name": "x"}', False), (b"[1]", False)],
)
def test_json_is_a_dump_if_it_has_the_keys_of_one(head, is_dump):
    assert FlightJsonReader().recognizes(head) is is_dump


def test_a_pickle_of_something_else_is_no_dump():
    assert not FlightPickleReader().recognizes(pickle.dumps({"version": 1, "state_dict": {}}, 2))
