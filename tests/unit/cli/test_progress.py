"""A bar on a terminal, and nothing anywhere else."""

import io
import os

import pytest

from ddpdoctor.cli.progress import ShownProgress


@pytest.fixture
def terminal():
    """A terminal to write to, and what reads all that was written."""
    reader, writer = os.openpty()
    stream = os.fdopen(writer, "w")

    def read():
        stream.close()
        text = b""
        while True:
            try:
                text += os.read(reader, 65536)
            except OSError:  # Linux's way to say that the other side is closed
                return text.decode()

    yield stream, read
    os.close(reader)


def test_a_terminal_shows_what_is_measured_and_the_time_left(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream, read = terminal
    with ShownProgress(stream, wanted=True) as progress:
        progress.show("all_reduce [float32] 1 MiB", 0.5, 75.0)

    text = read()
    assert "all_reduce [float32] 1 MiB" in text
    assert "1 min 15 s left" in text
    assert "\x1b[2K" in text  # it is taken away in the end


def test_other_ranks_and_other_streams_show_nothing(terminal):
    stream, read = terminal
    pipe = io.StringIO()
    for shown in (ShownProgress(stream, wanted=False), ShownProgress(pipe, wanted=True)):
        with shown as progress:
            progress.show("all_reduce", 0.5, None)

    assert (read(), pipe.getvalue()) == ("", "")


def test_after_it_was_stopped_nothing_more_is_shown(terminal):
    stream, read = terminal
    with ShownProgress(stream, wanted=True) as progress:
        progress.stop()
        progress.show("all_reduce", 0.5, 3.0)

    assert read() == ""
