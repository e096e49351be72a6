"""What was collected, made safe to print."""

from pathlib import Path

import pytest

from ddpdoctor.report.lines import clean, wrap

CWD = Path("/home/me/proj")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at /home/me/proj/train.py:3", "at train.py:3"),
        ("(/home/me/proj/a/b.py:3)", "(a/b.py:3)"),
        ("/home/me/project/train.py:3", "/home/me/project/train.py:3"),
        ("/mnt/home/me/proj/train.py:3", "/mnt/home/me/proj/train.py:3"),
        ("cd /home/me/proj/", "cd /home/me/proj/"),
    ],
)
def test_paths_below_the_working_directory_are_relative(text, shown):
    assert clean(text, CWD) == shown


def test_the_root_as_working_directory_shortens_nothing():
    assert clean("/a/train.py:3", Path("/")) == "/a/train.py:3"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x07", "a\\rb\\x07"),
        ("a\udcffb", "a\\udcffb"),
        ("right\u202eleft", "right\\u202eleft"),
        ("größe\n[/dev/shm]", "größe\n[/dev/shm]"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "\\x1b]8;;http://x\\x07link\\x1b]8;;\\x07"),
        ("\x9b31m \u2066x\u2069 \u200b", "\\x9b31m \\u2066x\\u2069 \\u200b"),
        ("::error::x", "\\x3a:error::x"),
        ("seen\n  ::Warning file=a::b, ::group::c", "seen\n  \\x3a:Warning file=a::b, \\x3a:group::c"),
        ("::add-mask::e ::stop-commands::f", "\\x3a:add-mask::e \\x3a:stop-commands::f"),
        ("/home/me/proj/::error::x", "\\x3a:error::x"),
        ("a ##vso[task.setvariable]b ##[error]c", "a \\x23#vso[task.setvariable]b \\x23#[error]c"),
        ("c10::Error ::1 [::]:29500 ::testing::x std::debug, ## a title #[x]",) * 2,
    ],
)
def test_nothing_that_a_terminal_or_a_runner_would_act_on_is_left(text, shown):
    assert clean(text, CWD) == shown


def test_a_word_is_never_broken():
    place = "/" + "x" * 60 + "/train-loop.py:61"
    lines = wrap(f"rank 3 stands at {place} and waits", 40, first="  ")
    assert any(place in line for line in lines)


def test_line_breaks_stay_and_all_lines_hang_under_the_first():
    assert wrap("one\ntwo", None, first="- ") == ["- one", "  two"]
    assert wrap("", 80, first="  x ") == ["  x"]
