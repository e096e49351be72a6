"""What a stream can show."""

import fcntl
import io
import os
import struct
import termios

import pytest

from ddpdoctor.cli.output import has_color, read_width, say, write


@pytest.fixture
def terminal():
    """A stream that is a terminal of 93 columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 93, 0, 0))
    with open(theirs, "w") as stream:  # noqa: PTH123  a descriptor, no path
        yield stream
    os.close(ours)


def test_a_terminal_has_a_width_and_colors(terminal):
    assert read_width(terminal) == 93
    assert has_color(terminal, {})
    assert has_color(terminal, {"NO_COLOR": ""})


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colors(terminal, env):
    assert not has_color(terminal, env)


def test_a_pipe_has_neither():
    assert read_width(io.StringIO()) is None
    assert not has_color(io.StringIO(), {"TERM": "xterm"})


def test_what_the_stream_cannot_say_is_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    write(stream, "größe → \udcff\n")
    assert raw.getvalue() == "größe ".encode("latin-1") + b"\\u2192 \\udcff\n"


def test_a_line_of_ours_says_whose_it_is():
    stream = io.StringIO()
    say(stream, "a\x1b[31mb")
    assert stream.getvalue() == "ddpdoctor: a\\x1b[31mb\n"
