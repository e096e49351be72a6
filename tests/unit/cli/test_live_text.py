"""A text that is shown again and again: in place on a terminal, one after the other elsewhere."""

import io
import os
import pty

from ddpdoctor.cli.live_text import LiveText

CURSOR_BACK = "\x1b[?25h"
"""What Rich writes last: the cursor is shown again."""


def test_on_a_terminal_the_next_text_takes_the_place_of_the_one_before(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        with LiveText(stream, in_place=True) as screen:
            assert screen.show("step 1\nrank \x1b[1m0\x1b[0m [/dev/shm]\n")
            assert screen.show("step 2\nrank 0\n")
        shown = ""
        while not shown.endswith(CURSOR_BACK):
            shown += os.read(master, 2**16).decode()
    os.close(master)
    before, _, _ = shown.partition("step 2")
    assert "step 1" in before
    assert "[/dev/shm]" in before  # what looks like markup stays as it is
    assert "\x1b[1A" in before.partition("step 1")[2]


def test_in_a_pipe_texts_have_an_empty_line_between_them():
    stream = io.StringIO()
    with LiveText(stream, in_place=True) as screen:
        screen.show("one\n")
        screen.show("two\n")
    assert stream.getvalue() == "one\n\ntwo\n"


def test_objects_are_lines():
    stream = io.StringIO()
    with LiveText(stream, in_place=False) as screen:
        screen.show("{}\n")
        screen.show("{}\n")
    assert stream.getvalue() == "{}\n{}\n"
