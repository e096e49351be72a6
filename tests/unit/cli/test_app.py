"""What ends the command, and with which status."""

import pytest

from ddpdoctor.cli.app import came_of_interrupt


class Struck:
    """A part of a class, in the making of which Ctrl-C strikes."""

    def __set_name__(self, owner, name):
        raise KeyboardInterrupt


def test_an_interrupt_as_a_class_is_made_is_one():
    # A RuntimeError before Python 3.12.
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - which one depends on the version
        type("Made", (), {"part": Struck()})
    assert came_of_interrupt(caught.value)


def test_an_error_in_what_ends_after_an_interrupt_is_none_of_its_own():
    error = OSError("gone")
    error.__context__ = KeyboardInterrupt()
    assert came_of_interrupt(error)


def test_any_other_error_is_a_defect():
    error = RuntimeError("b")
    error.__cause__ = KeyError("a")
    assert not came_of_interrupt(error)
