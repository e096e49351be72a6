"""Facts arrive as they were sent, and small records of calls, sides and pace."""

import importlib
import json
import math
import pkgutil
import random
import subprocess
import sys
import types
import typing
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum

import pytest

import ddpdoctor.model
from ddpdoctor.diagnose.machines import Facts, Head, Hello
from ddpdoctor.model.codec import WrongValue, decode, encode, field_hints
from ddpdoctor.model.findings import Report
from ddpdoctor.model.node import Clock, Limit, Node, NodeProcess
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.model.steps import RECENT_STEPS, StepEnd, StepTimes, recent_pace
from ddpdoctor.model.words import format_span, group_alike, grouped, majority_of, outvoted
from tests.golden import words
from tests.pictures import report as small_report
from tests.rules.build import call, pack_calls, phase

# Packed calls are the calls that were packed.


CALLS = (
    phase("new_group", 5, index=1, open_=False),
    call("all_reduce", 1, 20, index=2, open_=False),
    phase("backward", 30, index=3, group="0", begun=1, open_=False),
    call("all_reduce", 3, 20, index=4, open_=True),
    call("recv", None, 40, index=5, peer=2, open_=False),
    call("all_reduce", 4, 20, index=6, failed=True, open_=False),
)


def test_each_call_and_slice_comes_back_as_it_was_open_or_ended():
    log = pack_calls(CALLS)
    assert (tuple(log), log[0], log[-1], len(log)) == (CALLS, CALLS[0], CALLS[-1], len(CALLS))
    for part in (slice(2), slice(-2, None), slice(1, 5, 2), slice(9, 12)):
        assert tuple(log[part]) == CALLS[part]
    assert (log.open(), tuple(log.ended())) == ((CALLS[3],), (*CALLS[:3], *CALLS[4:]))
    assert pack_calls(CALLS[:2]).open() == ()
    none = pack_calls(())
    assert (tuple(none), none.open(), len(none.ended()), none.last) == ((), (), 0, {})


def test_equal_calls_are_one_kind_however_many_there_are_and_calls_are_found_by_it():
    many = pack_calls([call("all_reduce", n, 20, index=n, open_=False) for n in range(1, 2001)])
    assert (many.counts, many.last) == ({many.kinds[0]: 2000}, {many.kinds[0]: 1999})
    assert len(many.kinds) == 1
    log = pack_calls(CALLS)
    assert log.of_kinds(lambda kind: kind.failed) == (CALLS[5],)
    assert log.of_kinds(lambda kind: kind.op == "send") == ()
    assert log.last_of_kinds(lambda kind: kind.op == "all_reduce") == CALLS[5]
    assert log.last_of_kinds(lambda kind: kind.op == "send") is None


# What is sent arrives as it was, and what is not as the hints say is refused with its place.


EMPTY = small_report()


class Maker:
    """Makes a random value for any type hint."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def make(self, hint):
        origin, members = typing.get_origin(hint), typing.get_args(hint)
        if origin in {typing.Union, types.UnionType}:
            return self.make(self.random.choice(members))
        if origin is tuple:
            endless = len(members) == 2 and members[1] is ...
            return tuple(self.make(one) for one in (members[:1] * self.random.randrange(4) if endless else members))
        if origin is dict:
            return {self.make(str): self.make(members[1]) for _ in range(self.random.randrange(4))}
        if is_dataclass(hint):
            return hint(**{name: self.make(one) for name, one in field_hints(hint).items()})
        if isinstance(hint, type) and issubclass(hint, Enum):
            return self.random.choice(list(hint))
        return self.make_plain(hint)

    def make_plain(self, hint):
        if hint is str:
            return "".join(self.random.choices('aZ09 _/=~"\\\n\0é漢\udcff', k=self.random.randrange(9)))
        if hint is int:
            return self.random.choice([0, -1, 1, 2**63, self.random.getrandbits(40)])
        if hint is float:
            return self.random.choice([0.0, -1.5, 1e300, math.inf, -math.inf, self.random.random()])
        return None if hint is type(None) else self.random.random() < 0.5


def kinds_within(kind):
    """Return a dataclass and all that its fields may hold."""
    found: set[type] = set()
    waiting: list[typing.Any] = [kind]
    while waiting:
        hint = waiting.pop()
        waiting += typing.get_args(hint)
        if is_dataclass(hint) and hint not in found:
            found.add(typing.cast("type", hint))
            waiting += field_hints(hint).values()
    return found


KINDS = sorted(set().union(*map(kinds_within, (Facts, Hello, Head))), key=lambda kind: kind.__name__)


def there_and_back(value):
    return decode(type(value), json.loads(json.dumps(encode(value), allow_nan=False)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_fact_arrives_as_it_was_sent(kind):
    for seed in range(20):
        value = Maker(seed).make(kind)
        assert there_and_back(value) == value


def test_all_sections_are_among_them_and_floats_and_what_is_unread_arrive():
    sections = {"Node", "NodeProcess", "Unread", "Limits", "Network", "Gpu", "Rdma", "Pci"}
    assert {one.__name__ for one in KINDS} > sections
    assert math.isnan(there_and_back(Clock(synchronized=None, offset_s=math.nan)).offset_s)
    assert decode(Clock, {"synchronised": True, "offset_s": 3}).offset_s == 3.0
    node = Node(host="n", limits=Unread(why=Why.DENIED, reason="no"), conf_files=())
    assert there_and_back(node) == node


PROCESS = {"rank": 0, "local_rank": 0, "pid": 1, "variables": {}, "other_names": [], "cpus": [0, 1]}


def decode_node(row):
    return decode(Node, json.loads(row))


def decode_process(row):
    return decode(NodeProcess, PROCESS | json.loads(row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    settings: int = field(metadata={"json": "told"})


def test_a_field_that_got_another_name_has_its_old_one_in_json():
    assert encode(Renamed(settings=3)) == {"told": 3}
    assert decode(Renamed, {"told": 3}) == Renamed(settings=3)
    with pytest.raises(WrongValue, match="told: it is missing"):
        decode(Renamed, {"settings": 3})


def test_plain_json_is_passed_on_and_what_json_has_no_number_for_becomes_null():
    report = replace(EMPTY, data={"table": (1, math.nan, Why.DENIED, None, {"a": [True]})})
    assert there_and_back(report).data == {"table": [1, None, "denied", None, {"a": [True]}]}


def test_plain_json_that_is_nested_too_deeply_is_refused():
    deep: typing.Any = 1
    for _ in range(50):
        deep = [deep]
    with pytest.raises(WrongValue, match=r"data\['a'\]: it is nested too deeply"):
        decode(Report, {**encode(EMPTY), "data": {"a": deep}})


def test_the_codec_imports_only_the_modules_whose_records_it_meets():
    """To import all of ``model`` took half a second, which the ranks of a job would wait for."""
    program = "import sys; from ddpdoctor.model.codec import encode; from ddpdoctor.model.node import Node; "
    program += "encode(Node(host='n')); print('ddpdoctor.model.bandwidth' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambiguous:
    value: Limit | Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    value: set[int]


@pytest.mark.parametrize("kind", [Ambiguous, Odd])
def test_hints_that_json_cannot_carry_are_a_mistake_of_ours(kind):
    with pytest.raises(TypeError):
        decode(kind, {"value": {}})


def test_no_two_classes_of_the_model_have_one_name():
    """A hint is a name, which a module may import for type checkers only: it must mean one class."""
    names = [
        name
        for module in pkgutil.iter_modules(ddpdoctor.model.__path__, "ddpdoctor.model.")
        for name, one in vars(importlib.import_module(module.name)).items()
        if isinstance(one, type) and one.__module__ == module.name
    ]
    assert names
    assert sorted(names) == sorted(set(names))


# A rank's pace over its last steps, and spans of time in words.


MS = 1_000_000


def times(ends_ms, numbers=None, phases_us=(10_000, 0, 0, 0), waits_us=(2_500, 0, 0, 0)):
    count = len(ends_ms)
    return StepTimes(
        ends_with=StepEnd.REDUCTION, group="", numbers=numbers or tuple(range(1, count + 1)),
        phases_us=[(one,) * count for one in phases_us], waits_us=[(one,) * count for one in waits_us],
        ended_ns=tuple(end * MS for end in ends_ms),
    )  # fmt: skip


def test_a_step_takes_the_time_between_two_ends_of_the_last_steps():
    """Steps that the record lacks count too, and a single step takes what its phases took."""
    pace = recent_pace(times([10, 30, 50]))
    assert (pace.number, pace.ended_ns, pace.step_ms, pace.waits_share) == (3, 50 * MS, 20.0, 0.25)
    assert recent_pace(times([40, 80, 200], (4, 8, 20))).step_ms == 10.0
    slow = [1000 * step for step in range(1, 31)]
    quick = [30_000 + 10 * step for step in range(1, RECENT_STEPS + 1)]
    assert recent_pace(times(slow + quick)).step_ms == pytest.approx(10.0)
    kept = times([10])
    assert recent_pace(kept).step_ms == 10.0
    untimed = {name: getattr(kept, name) for name in StepTimes.__slots__} | {"ended_ns": ()}
    assert recent_pace(times([])) is recent_pace(StepTimes(**untimed)) is None


test_words = words(
    __name__, decode_node=decode_node, decode_process=decode_process, format_span=lambda text: format_span(float(text))
)


# Sides: who has the same, and who is outside the majority.


def test_sides_keep_their_order_the_largest_is_first_and_only_more_than_half_is_a_majority():
    assert list(grouped([("b", 3), ("a", 1), ("b", 2)]).items()) == [("b", [3, 2]), ("a", [1])]
    assert group_alike({3: "x", 0: "y", 2: "z", 1: "z"}) == [("z", (1, 2)), ("y", (0,)), ("x", (3,))]
    for sides, majority, others in (
        ([(0, 2), (1,)], (0, 2), (1,)), ([(1,), (0, 2, 3), (4,)], (0, 2, 3), (1, 4)), ([(0,), (1,)], (), (0, 1)),
        ([(2, 3), (0,), (1,)], (), (0, 1, 2, 3)), ([(0, 1)], (0, 1), ()), ([], (), ()),
    ):  # fmt: skip
        assert (majority_of(sides), outvoted(sides)) == (majority, others)
