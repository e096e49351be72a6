"""Lines of Slurm, frameworks, launchers and machines in a log, and those that are none of a rank's."""

from typing import Any

import pytest

from ddpdoctor.evidence.lines import MOST_CHARACTERS, LogSplitter, split_line, time_of
from ddpdoctor.evidence.machines import NvidiaSmiReader
from ddpdoctor.evidence.reader import MOST_QUOTED, Document, Line, quote
from ddpdoctor.evidence.stacks import foreign_frame, is_foreign_user_file
from ddpdoctor.model.evidence import (
    Time,
    Trouble,
    Who,
)

# Slurm's lines in a job's log.


# Where a run begins in a log, and which lines only look like that.


# The kernel's log, Kubernetes and nvidia-smi.


SMI = """\

==============NVSMI LOG==============

Timestamp                                 : Mon Mar  9 14:02:11 2026
Driver Version                            : 550.54.15
Attached GPUs                             : 2
GPU 00000000:1A:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU Recovery Action                   : None
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable Parity     : 0
            DRAM Uncorrectable            : 0
        Aggregate
            DRAM Uncorrectable            : 3
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 0
        Pending                           : No
        Remapping Failure Occurred        : No
    Clocks Event Reasons
        Idle                              : Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Not Active
GPU 00000000:4E:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU Recovery Action                   : {action}
    ECC Errors
        Volatile
            DRAM Uncorrectable            : {errors}
    Remapped Rows
        Pending                           : {pending}
        Remapping Failure Occurred        : {failure}
    Clocks Event Reasons
        HW Slowdown                       : {slow}
    Temperature
        GPU Current Temp                  : {temperature}
    FB Memory Usage
        Total                             : {temperature}
"""
WELL = {
    "action": "None", "errors": "0", "pending": "No", "failure": "No", "slow": "Not Active", "temperature": "44 C",
}  # fmt: skip


def smi(**values: str) -> list[tuple[str, str, bool]]:
    body = SMI.format(**{**WELL, **values}).encode()
    reader = NvidiaSmiReader()
    assert reader.recognizes(body)
    facts = reader.read(Document(source="smi.txt", path=None, body=body, who=Who(host="g7"))).facts
    found = [fact for fact in facts if isinstance(fact, Trouble)]
    assert len(found) == len(facts)
    assert {fact.who.host for fact in found} <= {"g7"}
    return [(fact.kind, fact.gpu, fact.fatal) for fact in found]


def test_healthy_gpus_say_nothing() -> None:
    assert smi() == []


@pytest.mark.parametrize(
    ("values", "kind", "fatal"),
    [
        ({"errors": "2"}, "xid", True), ({"pending": "Yes"}, "xid", True), ({"failure": "Yes"}, "xid", True),
        ({"action": "Reset"}, "gpu-lost", True), ({"slow": "Active"}, "slowdown", False),
        ({"temperature": "Unknown Error"}, "gpu-lost", True),
    ],
)  # fmt: skip
def test_faults_are_told_once_with_their_gpu(values: dict[str, str], kind: str, fatal: bool) -> None:  # noqa: FBT001
    assert smi(**values) == [(kind, "4e:00", fatal)]


def test_a_gpu_that_the_report_cannot_reach() -> None:
    line = "Unable to determine the device handle for GPU0000:4E:00.0: Unknown Error\n"
    body = (SMI.format(**WELL) + line).encode()
    facts = NvidiaSmiReader().read(Document(source="smi.txt", path=None, body=body)).facts
    assert [(fact.kind, fact.gpu) for fact in facts if isinstance(fact, Trouble)] == [("gpu-lost", "4e:00")]


# Prefixes of launchers and log collectors, in any nesting, and what they say.


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


# Whose code a frame is, by the path alone, and what is quoted.


@pytest.mark.parametrize(
    "file",
    [
        "/workspace/train.py", "train.py", "src/model.py", "./train.py", "<stdin>", "<string>", "C:\\work\\train.py",
        "/home/me/torch/train.py", "/home/me/lib/model.py",
    ],
)  # fmt: skip
def test_files_of_the_user(file: str) -> None:
    assert is_foreign_user_file(file)
    assert foreign_frame(file, 5, "main").user


@pytest.mark.parametrize(
    "file",
    [
        "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", "/usr/lib/python3/dist-packages/yaml/x.py",
        "/opt/conda/lib/python3.10/threading.py", "/pytorch/torch/distributed/distributed_c10d.py", "<frozen runpy>",
        "torch/autograd/graph.py", "threading.py", "multiprocessing/queues.py", "transformers/trainer.py",
        "C:\\Python311\\Lib\\threading.py",
    ],
)  # fmt: skip
def test_files_of_libraries(file: str) -> None:
    assert not is_foreign_user_file(file)


def test_a_quote_is_one_short_line_without_secrets() -> None:
    assert quote("a\n  b\tc") == "a b c"
    assert "hunter2" not in quote("export WANDB_API_KEY=hunter2hunter2 before")
    assert len(quote("x y " * 500)) == MOST_QUOTED


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("[E309 14:12:11.043307900 ProcessGroupNCCL.cpp:616] [Rank 2] text", 5839931.0433079),
        ("[W1122 12:32:07.602000000 x.cpp:1] text", 28125127.602),
        ("W0309 14:02:19.300000 4011 torch/distributed/elastic/api.py:1028] text", 5839339.3),
        ("100%|###| 3/3 [E309 14:12:11.043307900 x.cpp:616] text", 5839931.0433079),
        ("[E ProcessGroupNCCL.cpp:475] [Rank 2] text", None),
        ("[E1399 14:12:11.043307900 x.cpp:616] text", None),
    ],
)
def test_times_of_torchs_own_heads_are_on_a_clock_of_their_own(text: str, seconds: float | None) -> None:
    line = Line(text=text, number=1, source="job.log", who=Who(host="h1"))
    time = time_of(line)
    assert (time.seconds if time else None) == (pytest.approx(seconds) if seconds is not None else None)
    assert time is None or time.clock == "h1, no year"


def test_the_time_of_a_prefix_is_better_than_that_of_a_head() -> None:
    time = Time(seconds=1.0, clock="h1")
    assert time_of(Line(text="[E309 14:12:11.043307900 x.cpp:1] ", number=1, source="f", time=time)) is time


# Progress and ends of trainers, DeepSpeed's launcher, and all that must stay silent.
