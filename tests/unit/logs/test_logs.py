"""Lines of Slurm, frameworks, launchers and machines in a log, and those that are none of a rank's."""

import pytest

from ddpdoctor.logs.lines import MOST_CHARACTERS, MOST_QUOTED, Line, LogSplitter, quote, split_line, time_of
from ddpdoctor.logs.stacks import is_foreign_user_file
from ddpdoctor.model.log_facts import Time, Who
from tests.golden import outline, words

# Prefixes of launchers and log collectors, in any nesting, and what they say.


def split(raw: str) -> str:
    """Return what is left of a line, who wrote it and when: times are on the clock of their host or file."""
    line = split_line(raw, 5, "job.log")
    assert (line.spot().source, line.spot().line) == ("job.log", 5)
    time = f"{line.time.seconds} by {line.time.clock}" if line.time else "no time"
    return f"{'as it is' if line.text == raw else repr(line.text)}, {outline(line.who)}, {time}"


def head_time(raw: str) -> str:
    """Return the time of torch's own head, which is on a clock of its own."""
    time = time_of(Line(text=raw, number=1, source="job.log", who=Who(host="h1")))
    return f"{time.seconds:.7f} by {time.clock}" if time else "no time"


test_words = words(__name__, split_line=split, time_of=head_time, user_file=is_foreign_user_file, quote=quote)


def test_a_long_line_is_cut() -> None:
    assert len(split_line("x" * (2 * MOST_CHARACTERS), 1, "f").text) == MOST_CHARACTERS


def test_a_path_names_the_writer_and_a_prefix_overrides_it() -> None:
    assert split_line("text", 1, "f", Who(rank=2, host="n1")).who == Who(rank=2, host="n1")
    assert split_line("[rank3]: text", 1, "f", Who(rank=2, host="n1")).who == Who(rank=3, host="n1")


def test_a_progress_bar_ends_its_parts_with_carriage_returns() -> None:
    lines = LogSplitter("f").lines(" 40%|####  |\r 50%|#####|\r[rank1]: text\ntext\r\n", 7)
    assert [(line.number, line.text, line.who.rank) for line in lines] == [
        (7, " 40%|####  |", None),
        (7, " 50%|#####|", None),
        (7, "text", 1),
        (8, "text", None),
    ]


@pytest.mark.parametrize("unit", ["a1", "a", "[a1", "[", "(pid=1 ", "1", " ", "a-", "A1 ", "|", "[pod/"])
def test_the_time_for_a_hostile_line_grows_with_its_length_only(unit: str) -> None:
    """With a pattern that backtracks, such a line takes minutes, and the test's time limit ends it."""
    for _ in range(50):
        assert split_line(unit * MOST_CHARACTERS, 1, "f").source == "f"


def test_a_quote_is_short() -> None:
    assert len(quote("x y " * 500)) == MOST_QUOTED


def test_the_time_of_a_prefix_is_better_than_that_of_a_head() -> None:
    time = Time(seconds=1.0, clock="h1")
    assert time_of(Line(text="[E309 14:12:11.043307900 x.cpp:1] ", number=1, source="f", time=time)) is time
