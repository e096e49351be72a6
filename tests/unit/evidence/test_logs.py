"""Lines of Slurm, frameworks, launchers and machines in a log, and those that are none of a rank's."""

from typing import Any

import pytest

from ddpdoctor.evidence.lines import MOST_CHARACTERS, LogSplitter, split_line, time_of
from ddpdoctor.evidence.reader import MOST_QUOTED, Line, quote
from ddpdoctor.evidence.stacks import foreign_frame, is_foreign_user_file
from ddpdoctor.model.evidence import Time, Who
from tests.golden import Cases

CASES = Cases(__name__)
test_kept = CASES.test()

# Prefixes of launchers and log collectors, in any nesting, and what they say.


WATCHDOG = "[E309 14:12:11.043307900 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught"
PREFIXED = [
    "[rank3]: Traceback (most recent call last):", "[rank3]:   File x", f"[rank3]:{WATCHDOG}",
    "[rank: 0] Seed set to 42", "rank7: text", "[trainer/rank=12]:text", "003: text", " 3: [rank3]: text",
    "[default1]:[rank5]: text", "[1,4]<stderr>:text", "[4]<stdout>:text",
    "(RayTrainWorker pid=19799, ip=10.72.0.6) [rank2]: text", "(VllmWorker rank=1 pid=85) text",
    "[pod/job-worker-0/pytorch] 2024-08-23T22:22:51.874Z [rank1]: text", "trainer-1  | text",
    "worker-1: [rank9]: text", "Mar  9 14:02:19 gpu07 kernel: NVRM: Xid", "[80746] text", " | [rank0]: text",
    "\x1b[31m[rank0]:\x1b[0m \x1b[1mtext\x1b[0m", "[rank99999999]: an impossible number",
]  # fmt: skip
DATED = [
    "2026-03-09 14:02:11 INFO text", "2026-03-09T14:02:11.250Z text", "[2026-03-09 14:02:11,250] text",
    "worker-1: 2026-03-09 14:02:11 text", "[Mon Mar  9 14:02:11 2026] text", "18:11:06.680 text", "[12345.678901] text",
    "2026-13-09 14:02:11 text",
]  # fmt: skip
HEADS = [
    "[E309 14:12:11.043307900 ProcessGroupNCCL.cpp:616] [Rank 2] text", "[W1122 12:32:07.602000000 x.cpp:1] text",
    "W0309 14:02:19.300000 4011 torch/distributed/elastic/api.py:1028] text",
    "100%|###| 3/3 [E309 14:12:11.043307900 x.cpp:616] text", "[E ProcessGroupNCCL.cpp:475] [Rank 2] text",
    "[E1399 14:12:11.043307900 x.cpp:616] text",
]  # fmt: skip
NO_PREFIX = [
    "RuntimeError: 3: text", "step1: loss 4.2", "[0]:", "  time      : 2026-03-09_14:02:19",
    "[E ProcessGroupNCCL.cpp:475] [Rank 2] text", "h1:20100:20100 [0] NCCL INFO text", "[Rank 2] Watchdog caught",
    "    _engine_run_backward (torch/autograd/graph.py:829)", "[PG ID 0 PG GUID 0(default_pg) Rank 2] text",
    "srun: error: n042: task 3: Out Of Memory", "", "0it [00:00, ?it/s]",
]  # fmt: skip


@CASES
def prefixes_and_times_that_are_taken_off_and_understood() -> dict[str, Any]:
    """Times are on the clock of their host or file, those of torch's own heads on one of their own."""
    told: dict[str, Any] = {}
    for raw in (*PREFIXED, *DATED):
        line = split_line(raw, 5, "job.log")
        assert (line.spot().source, line.spot().line) == ("job.log", 5)
        told[ascii(raw)] = [
            repr(line.text),
            line.who,
            f"{line.time.seconds} by {line.time.clock}" if line.time else "no time",
        ]
    for raw in HEADS:
        time = time_of(Line(text=raw, number=1, source="job.log", who=Who(host="h1")))
        told[f"the head {raw}"] = f"{time.seconds:.7f} by {time.clock}" if time else "no time"
    return told


def test_what_only_looks_like_a_prefix_stays() -> None:
    lines = [split_line(raw, 1, "job.log") for raw in NO_PREFIX]
    assert [(line.text, line.who) for line in lines] == [(raw, Who()) for raw in NO_PREFIX]


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


# Whose code a frame is, by the path alone, and what is quoted.


OWN_FILES = (
    "/workspace/train.py", "train.py", "src/model.py", "./train.py", "<stdin>", "<string>", "C:\\work\\train.py",
    "/home/me/torch/train.py", "/home/me/lib/model.py",
)  # fmt: skip
OF_LIBRARIES = (
    "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", "/usr/lib/python3/dist-packages/yaml/x.py",
    "/opt/conda/lib/python3.10/threading.py", "/pytorch/torch/distributed/distributed_c10d.py", "<frozen runpy>",
    "torch/autograd/graph.py", "threading.py", "multiprocessing/queues.py", "transformers/trainer.py",
    "C:\\Python311\\Lib\\threading.py",
)  # fmt: skip


def test_files_of_the_user_and_of_libraries() -> None:
    assert [file for file in (*OWN_FILES, *OF_LIBRARIES) if is_foreign_user_file(file)] == [*OWN_FILES]
    assert all(foreign_frame(file, 5, "main").user for file in OWN_FILES)


def test_a_quote_is_one_short_line_without_secrets() -> None:
    assert quote("a\n  b\tc") == "a b c"
    assert "hunter2" not in quote("export WANDB_API_KEY=hunter2hunter2 before")
    assert len(quote("x y " * 500)) == MOST_QUOTED


def test_the_time_of_a_prefix_is_better_than_that_of_a_head() -> None:
    time = Time(seconds=1.0, clock="h1")
    assert time_of(Line(text="[E309 14:12:11.043307900 x.cpp:1] ", number=1, source="f", time=time)) is time
