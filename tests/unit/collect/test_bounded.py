import threading

import pytest

from ddpdoctor.collect.bounded import ask_side_by_side


def test_answers_and_errors():
    def fail():
        raise OSError(-2, "Name or service not known")

    replies = ask_side_by_side({"good": lambda: 7, "bad": fail}, 60.0)
    assert (replies["good"].value, replies["good"].timed_out) == (7, False)
    assert replies["bad"].error.strerror == "Name or service not known"


def test_what_hangs_is_left_and_the_rest_has_answered():
    forever = threading.Event()
    replies = ask_side_by_side({"hangs": forever.wait, "too": forever.wait, "good": lambda: True}, 1.0)
    assert [(name, reply.timed_out) for name, reply in replies.items()] == [
        ("hangs", True),
        ("too", True),
        ("good", False),
    ]
    assert replies["hangs"].duration_s >= 0.9
    forever.set()


def test_a_defect_is_raised():
    with pytest.raises(ZeroDivisionError):
        ask_side_by_side({"defect": lambda: 1 // 0}, 5.0)
