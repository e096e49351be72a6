"""What a tracker says must let ranks be compared: the same count in the same group is the same call."""

import time

from ddpdoctor.probes.bandwidth.tracker import START_ALLOWANCE_S, Tracker

WORLD, PAIR = (0, 1, 2), (0, 1)


def call(tracker, op, group):
    tracker.enter(op, group)
    tracker.leave()


def test_calls_are_counted_by_group_whatever_lies_between():
    in_pair, alone = Tracker(), Tracker()
    for tracker, groups in ((in_pair, (WORLD, PAIR, PAIR, WORLD)), (alone, (WORLD, WORLD))):
        for group in groups:
            call(tracker, "barrier", group)
    assert (in_pair.group, in_pair.calls) == (alone.group, alone.calls) == (WORLD, 2)


def test_a_call_that_does_not_return_leaves_it_inside():
    tracker = Tracker()
    tracker.enter("all_reduce", WORLD)
    assert (tracker.op, tracker.inside) == ("all_reduce", True)
    tracker.leave()
    assert not tracker.inside


def test_what_comes_next_is_progress_and_sets_what_it_may_take():
    before = time.monotonic()
    tracker = Tracker()
    assert tracker.allowance_s == START_ALLOWANCE_S
    tracker.at("measure", "all_reduce float32 1 GiB", allowance_s=7.0)
    assert (tracker.phase, tracker.what, tracker.allowance_s) == ("measure", "all_reduce float32 1 GiB", 7.0)
    assert tracker.moved_s >= before
    tracker.at("end")
    assert (tracker.what, tracker.allowance_s) == ("", 0.0)
