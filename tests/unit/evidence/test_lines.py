"""Prefixes of launchers and log collectors, in any nesting, and what they say."""

from typing import Any

import pytest

from ddpdoctor.evidence.lines import MOST_CHARACTERS, LogSplitter, split_line
from ddpdoctor.model.evidence import Who

WATCHDOG = "[E309 14:12:11.043307900 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught"
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("[rank3]: Traceback (most recent call last):", "Traceback (most recent call last):", {"rank": 3}),
    ("[rank3]:   File x", "  File x", {"rank": 3}),
    (f"[rank3]:{WATCHDOG}", WATCHDOG, {"rank": 3}),
    ("[rank: 0] Seed set to 42", "Seed set to 42", {"rank": 0}),
    ("rank7: text", "text", {"rank": 7}),
    ("[trainer/rank=12]:text", "text", {"rank": 12}),
    ("003: text", "text", {"task": 3}),
    (" 3: [rank3]: text", "text", {"task": 3, "rank": 3}),
    ("[default1]:[rank5]: text", "text", {"local_rank": 1, "rank": 5}),
    ("[1,4]<stderr>:text", "text", {"rank": 4}),
    ("[4]<stdout>:text", "text", {"rank": 4}),
    (
        "(RayTrainWorker pid=19799, ip=10.72.0.6) [rank2]: text",
        "text",
        {"pid": 19799, "address": "10.72.0.6", "rank": 2},
    ),
    ("(VllmWorker rank=1 pid=85) text", "text", {"rank": 1, "pid": 85}),
    ("[pod/job-worker-0/pytorch] 2024-08-23T22:22:51.874Z [rank1]: text", "text", {"host": "job-worker-0", "rank": 1}),
    ("trainer-1  | text", "text", {"host": "trainer-1"}),
    ("worker-1: [rank9]: text", "text", {"host": "worker-1", "rank": 9}),
    ("Mar  9 14:02:19 gpu07 kernel: NVRM: Xid", "NVRM: Xid", {"host": "gpu07"}),
    ("[80746] text", "text", {}),
    (" | [rank0]: text", "text", {"rank": 0}),
    ("\x1b[31m[rank0]:\x1b[0m \x1b[1mtext\x1b[0m", "text", {"rank": 0}),
]


@pytest.mark.parametrize(("raw", "text", "who"), CASES)
def test_prefixes_are_taken_off_and_understood(raw: str, text: str, who: dict[str, Any]) -> None:
    line = split_line(raw, 5, "job.log")
    assert line.text == text
    assert line.who == Who(**who)
    assert (line.spot().source, line.spot().line) == ("job.log", 5)


@pytest.mark.parametrize(
    "raw",
    [
        "RuntimeError: 3: text", "step1: loss 4.2", "[0]:", "  time      : 2026-03-09_14:02:19",
        "[E ProcessGroupNCCL.cpp:475] [Rank 2] text", "h1:20100:20100 [0] NCCL INFO text", "[Rank 2] Watchdog caught",
        "    _engine_run_backward (torch/autograd/graph.py:829)", "[PG ID 0 PG GUID 0(default_pg) Rank 2] text",
        "srun: error: n042: task 3: Out Of Memory", "", "0it [00:00, ?it/s]",
    ],
)  # fmt: skip
def test_what_only_looks_like_a_prefix_stays(raw: str) -> None:
    line = split_line(raw, 1, "job.log")
    assert (line.text, line.who) == (raw, Who())


@pytest.mark.parametrize(
    ("raw", "seconds", "clock"),
    [
        ("2026-03-09 14:02:11 INFO text", 1773064931.0, "job.log"),
        ("2026-03-09T14:02:11.250Z text", 1773064931.25, "job.log"),
        ("[2026-03-09 14:02:11,250] text", 1773064931.25, "job.log"),
        ("worker-1: 2026-03-09 14:02:11 text", 1773064931.0, "worker-1"),
        ("[Mon Mar  9 14:02:11 2026] text", 1773064931.0, "job.log"),
        ("18:11:06.680 text", 65466.68, "job.log, no date"),
        ("[12345.678901] text", 12345.678901, "job.log, no date"),
    ],
)
def test_times_are_on_the_clock_of_their_host_or_file(raw: str, seconds: float, clock: str) -> None:
    time = split_line(raw, 1, "job.log").time
    assert time is not None
    assert (time.seconds, time.clock) == (pytest.approx(seconds), clock)


def test_impossible_numbers_and_dates_are_no_facts() -> None:
    assert split_line("[rank99999999]: text", 1, "f").who.rank is None
    assert split_line("2026-13-09 14:02:11 text", 1, "f").time is None


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
