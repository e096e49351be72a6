"""Who is here, silent, gone or was never heard, and who is waited for."""

import time
from dataclasses import replace

import pytest

from ddpdoctor.exchange.store import Heard
from ddpdoctor.launch.command.placement import Placement
from ddpdoctor.launch.nodes.members_heard import BROKEN_NS, FRESH_NS, SILENT_NS, MembersHeard
from ddpdoctor.launch.nodes.node_messages import LAST, Greeting, Pulse, write_pulse
from ddpdoctor.launch.watching.suspicion import NodeProgress
from ddpdoctor.model.nodes import Presence

S = 1_000_000_000
PLACE = Placement(number=0, expected=2, hosts=("dd0",), names=("dd0", "dd1"))
PULSE = Pulse(progress=NodeProgress(alive=2, ended_s=3.0), ranks=(2, 3))


def heard(ago_ns=0, pulse=PULSE, **more):
    return Heard(heard_ns=time.monotonic_ns() - ago_ns, said=write_pulse(pulse), **more)


def members(*others):
    made = MembersHeard(PLACE, "dd0")
    made.hear({str(number): one for number, one in enumerate(others, start=1)})
    return made


PRESENCES = {
    "beats": (heard, Presence.HERE),
    "late by some beats": (lambda: heard(FRESH_NS + S), Presence.HERE),
    "not heard for long": (lambda: heard(SILENT_NS + S), Presence.SILENT),
    "its connection broke a moment ago": (lambda: heard(S, broken_ns=time.monotonic_ns() - S), Presence.HERE),
    "its connection broke": (lambda: heard(S, broken_ns=time.monotonic_ns() - BROKEN_NS - S), Presence.SILENT),
    "it said so": (lambda: heard(SILENT_NS + S, left=b"1"), Presence.LEFT),
}


@pytest.mark.parametrize("case", PRESENCES)
def test_presence(case):
    make, expected = PRESENCES[case]
    assert members(make()).seen().nodes[1].presence is expected


def test_who_never_came_is_absent_under_the_name_that_was_given():
    node = members().seen().nodes[1]
    assert (node.presence, node.host, node.heard_ns) == (Presence.ABSENT, "dd1", None)


@pytest.mark.parametrize(
    ("left", "status"),
    [
        (b"1", 1),
        (b"-9", -9),
        (b"null", None),
        (b"x", None),
        (b"", None),
        (b"Infinity", None),
        (b"-Infinity", None),
        (b"NaN", None),
        (b"1e999", None),
        (b"9" * 128, None),
        (b"[" * 128, None),
        (b"true", None),
        (b"1.5", None),
        (b"\xff", None),
    ],
)
def test_the_last_word_is_a_status(left, status):
    assert members(heard(left=left)).seen().nodes[1].status == status


def test_a_greeting_gives_name_and_clocks_and_reports_a_number_that_two_have():
    made = members(heard())
    assert made.unknown() == [1]
    made.greet(1, Greeting(host="h", pid=1, started_as=0, wall_offset_s=0.5, clock_offset_ns=7, clock_error_ns=2))
    node = made.seen().nodes[1]
    assert (node.host, node.clock_offset_ns, node.clock_error_ns, node.ranks) == ("h", 7, 2, (2, 3))
    assert "number 0" in node.why
    assert made.unknown() == []


WAITED = {
    "who beats has to answer": (heard, False, True),
    "who beats had its time": (heard, True, False),
    "who may be silent soon is waited for": (lambda: heard(FRESH_NS + S), True, True),
    "who is silent is not waited for": (lambda: heard(SILENT_NS + S), False, False),
    "who has left is not waited for": (lambda: heard(left=b"0"), False, False),
}


@pytest.mark.parametrize("case", WAITED)
def test_who_is_waited_for(case):
    make, late, waits = WAITED[case]
    assert members(make()).have_answered(1, late=late) is not waits


MOVED = {
    "who beats has moved": (heard, True),
    "who was cut off since then moves no more": (lambda pulse: heard(SILENT_NS + S, pulse), False),
    "who has left moves no more": (lambda pulse: heard(pulse=pulse, left=b"0"), False),
}


@pytest.mark.parametrize("case", MOVED)
def test_whose_last_word_that_it_moved_still_counts(case):
    make, counts = MOVED[case]
    assert members(make(pulse=replace(PULSE, moved=True))).have_moved() is counts


def test_an_answer_is_fetched_once():
    made = members(heard(pulse=replace(PULSE, answered=2)))
    assert made.unread() == [(1, 2)]
    made.receive(1, 2, b"packed")
    assert made.unread() == []
    assert made.have_answered(2, late=False)
    assert not made.have_ended()
    assert made.take_packed() == {1: b"packed"}
    assert made.take_packed() == {}


def test_all_have_ended_once_the_last_of_it_is_here():
    made = members(heard(pulse=replace(PULSE, answered=LAST)))
    assert not made.have_ended()
    made.receive(1, LAST, b"packed")
    assert made.have_ended()


@pytest.mark.parametrize(("status", "ended_s"), [(None, 3.0), (0, 3.0), (1, None), (-9, None)])
def test_for_ranks_of_a_launcher_that_failed_nobody_waits_in_vain(status, ended_s):
    (progress,) = members(heard(pulse=replace(PULSE, status=status))).progress()
    assert progress.ended_s == ended_s


def test_who_is_silent_says_nothing_of_its_ranks():
    assert members(heard(SILENT_NS + S)).progress() == []


def test_names_that_are_no_numbers_are_not_heard():
    made = MembersHeard(PLACE, "dd0")
    made.hear({"x": heard(), "-1": heard(), "9999999": heard(), "²": heard()})
    assert len(made.seen().nodes) == 2


def test_what_members_send_that_does_not_fit_with_the_others_counts_as_lost(monkeypatch):
    monkeypatch.setattr("ddpdoctor.launch.nodes.members_heard.MAX_PACKED_BYTES", 10)
    made = members(heard(), heard(), heard())
    for number, size in ((1, 6), (2, 6), (3, 4)):
        made.receive(number, 1, bytes(size))
    assert made.have_answered(1, late=False)
    assert made.take_packed() == {1: bytes(6), 3: bytes(4)}


def test_a_name_that_no_host_has_is_not_kept():
    made = members(heard())
    made.greet(1, Greeting(host="h" * 256, pid=1, started_as=1, wall_offset_s=0, clock_offset_ns=0, clock_error_ns=0))
    assert made.seen().nodes[1].host == "dd1"
