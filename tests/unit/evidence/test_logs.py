"""Lines of Slurm, frameworks, launchers and machines in a log, and those that are none of a rank's."""

from typing import Any

import pytest

from ddpdoctor.evidence.frameworks import FrameworkReader, LaunchReader
from ddpdoctor.evidence.lines import MOST_CHARACTERS, LogSplitter, split_line, time_of
from ddpdoctor.evidence.machines import KernelReader, KubernetesReader, NcclTestsReader, NvidiaSmiReader
from ddpdoctor.evidence.nccl_log import NcclLogReader
from ddpdoctor.evidence.reader import MOST_QUOTED, Document, Line, quote
from ddpdoctor.evidence.slurm import SlurmReader
from ddpdoctor.evidence.stacks import foreign_frame, is_foreign_user_file
from ddpdoctor.model.evidence import (
    Exited,
    Fact,
    Finished,
    Hint,
    Launched,
    Moving,
    NcclPaths,
    Seen,
    Stopped,
    Time,
    Trouble,
    Who,
)
from tests.unit.evidence.feeding import feed, read_text

# Slurm's lines in a job's log.


def read(text: str) -> list[Fact]:
    return read_text(SlurmReader(), text)


TASKS = [
    ("srun: error: n042: task 3: Out Of Memory", [(3, "SIGKILL", None, False, True)]),
    ("srun: error: n041: tasks 0-1: Terminated", [(n, "SIGTERM", None, True, False) for n in (0, 1)]),
    ("srun: error: n041: tasks 0,2-3: Exited with exit code 1", [(n, "", 1, False, False) for n in (0, 2, 3)]),
    ("srun: error: n041: task 7: Exited with exit code 137", [(7, "SIGKILL", None, False, False)]),
    ("srun: error: n041: task 7: Segmentation fault (core dumped)", [(7, "SIGSEGV", None, False, False)]),
    ("srun: error: n041: task 7: Aborted (core dumped)", [(7, "SIGABRT", None, False, False)]),
    ("srun: error: n041: task 7: Bus error", [(7, "SIGBUS", None, False, False)]),
    ("12: srun: error: n041: task 7: Killed", [(7, "SIGKILL", None, False, False)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "ends"), TASKS)
def test_the_end_of_tasks(text: str, ends: list[tuple[int, str, int | None, bool, bool]]) -> None:
    found = [fact for fact in read(text) if isinstance(fact, Exited)]
    shown = [(one.who.task, one.signal, one.code, one.by_launcher, one.memory) for one in found]
    assert shown == ends
    assert {one.who.host for one in found} <= {"n041", "n042"}


def test_what_is_killed_after_the_step_is_ended_was_told_to() -> None:
    text = (
        "srun: error: n1: task 3: Exited with exit code 1\n"
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: n1: tasks 0-2: Killed\n"
    )
    ends = {fact.who.task: fact.by_launcher for fact in read(text) if isinstance(fact, Exited)}
    assert ends == {0: True, 1: True, 2: True, 3: False}


OOM = [
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4410.0. Some of the step tasks have been OOM Killed.",
    "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=4410.batch. Some of your processes may have been killed",
    "slurmstepd: error: Detected 1 oom-kill event(s) in step 4410.0 cgroup.",
    "slurmstepd: error: Step 4410.0 exceeded memory limit (4300000 > 4194304), being killed",
    "slurmstepd: error: Exceeded job memory limit",
]


@pytest.mark.parametrize("text", OOM)
def test_memory_limits_are_a_trouble_of_the_host(text: str) -> None:
    (fact,) = read(text)
    assert isinstance(fact, Trouble)
    assert (fact.kind, fact.fatal) == ("oom", True)


STOPS = [
    ("*** STEP 912.0 ON g001 CANCELLED AT 2026-03-09T14:02:11 DUE TO TIME LIMIT ***", "time limit"),
    ("*** JOB 912 ON g001 CANCELLED AT 2026-03-09T14:02:11 DUE TO PREEMPTION ***", "preemption"),
    ("*** JOB 912 ON g001 CANCELLED AT 2026-03-09T14:02:11 DUE TO JOB REQUEUE ***", "requeue"),
    ("*** STEP 912.0 ON g001 CANCELLED AT 2026-03-09T14:02:11 ***", "cancelled"),
]


@pytest.mark.parametrize(("text", "by"), STOPS)
def test_who_stopped_a_job(text: str, by: str) -> None:
    (fact,) = read(f"slurmstepd: error: {text}")
    assert isinstance(fact, Stopped)
    assert fact.by == by
    assert fact.time is not None
    assert fact.time.clock == "g001"


def test_a_node_that_failed() -> None:
    words = (
        "*** STEP 9.0 ON g001 CANCELLED AT 2026-03-09T14:02:11 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
    )
    facts = read(f"srun: error: Node failure on g[003,007]\nslurmstepd: error: {words}\n")
    shown = [(fact.kind, fact.who.host) for fact in facts if isinstance(fact, Trouble)]
    assert shown == [("node-failure", "g003"), ("node-failure", "g007"), ("node-failure", "")]


@pytest.mark.parametrize(
    "text",
    [
        "srun: job 4410 queued and waiting for resources", "srun: job 4410 has been allocated resources",
        "srun: Warning: can't honor --ntasks-per-node", "srun: error: n1: tasks 0-99999999999999999999: Terminated x",
        "INFO: see srun: error: handling", "slurmstepd: info: task/affinity", "srun: Step created for StepId=1.0",
    ],
)  # fmt: skip
def test_other_lines_say_nothing(text: str) -> None:
    assert read(text) == []


# Where a run begins in a log, and which lines only look like that.


@pytest.mark.parametrize(
    "text",
    [
        "NCCL version 2.27.3+cuda12.9",
        "h1:20100:20100 [0] NCCL INFO NCCL version 2.27.3+cuda12.9",
        "W0309 14:02:19 4011 torch/distributed/run.py:766] Setting OMP_NUM_THREADS environment variable for each process to",
        "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2",
    ],
)
def test_lines_with_which_a_run_begins(text: str) -> None:
    assert [type(fact) for fact in feed(LaunchReader(), text)] == [Launched]


@pytest.mark.parametrize(
    "text",
    [
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1970, unhandled system error, NCCL version 2.20.5",
        "Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2",
        "checked OMP_NUM_THREADS",
        "NCCL version 2.29.7 compiled with CUDA 12.9",
    ],
)
def test_lines_that_begin_nothing(text: str) -> None:
    assert feed(LaunchReader(), text) == []


# The kernel's log, Kubernetes and nvidia-smi.


XID = "NVRM: Xid (PCI:0000:4e:00): {code}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def kernel(text: str, host: str = "") -> list[Fact]:
    return read_text(KernelReader(), text, Who(host=host))


@pytest.mark.parametrize(
    ("code", "fatal"),
    [
        *((code, True) for code in (79, 48, 64, 74, 94, 95, 119, 120)),
        *((code, False) for code in (13, 31, 43, 45, 63, 9999)),
    ],
)
def test_xids_are_causes_or_consequences(code: int, fatal: bool) -> None:  # noqa: FBT001
    (fact,) = kernel(f"Mar  9 14:02:11 g7 kernel: {XID.format(code=code)}")
    assert isinstance(fact, Trouble)
    assert (fact.kind, fact.gpu, fact.who.host, fact.fatal) == ("xid", "4e:00", "g7", fatal)
    assert f"Xid {code}" in fact.problem
    assert "{index}" not in fact.fix


@pytest.mark.parametrize(
    "prefix", ["", "[12345.678901] ", "[Mon Mar  9 14:02:11 2026] ", "Mar  9 14:02:11 g7 kernel: "]
)
def test_every_form_of_the_kernels_log(prefix: str) -> None:
    (fact,) = kernel(f"{prefix}NVRM: Xid (0000:4e:00.0): 13, Graphics Exception")
    assert isinstance(fact, Trouble)
    assert fact.gpu == "4e:00"


CGROUP = (
    "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n"
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/slurm/job_88,"
    "task_memcg=/slurm/job_88/step_0,task=python3,pid=51232,uid=1004\n"
)
KILLED = "Memory cgroup out of memory: Killed process 51232 (python3) total-vm:9kB, anon-rss:8kB, file-rss:0kB\n"


@pytest.mark.parametrize("text", [CGROUP + KILLED, CGROUP, KILLED])
def test_a_process_that_is_killed_for_memory_is_told_once(text: str) -> None:
    trouble, exited = kernel(text, host="g7")
    assert isinstance(trouble, Trouble)
    assert (trouble.kind, trouble.fatal, "cgroup" in trouble.problem) == ("oom", True, True)
    assert isinstance(exited, Exited)
    assert (exited.who, exited.signal, exited.memory) == (Who(host="g7", pid=51232), "SIGKILL", True)


def test_a_whole_machine_without_memory() -> None:
    trouble, _ = kernel("Out of memory: Killed process 7 (pt_main_thread) total-vm:9kB, anon-rss:8kB")
    assert isinstance(trouble, Trouble)
    assert "the memory of the machine" in trouble.problem


def test_another_program_that_is_killed_is_no_fault_of_the_job() -> None:
    (trouble,) = kernel("Out of memory: Killed process 7 (java) total-vm:9kB, anon-rss:8kB")
    assert isinstance(trouble, Trouble)
    assert not trouble.fatal


@pytest.mark.parametrize(
    "text",
    [
        "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error",
        "Unable to determine the device handle for GPU 0000:03:00.0: GPU is lost.  Reboot the system",
        "Unable to determine the device handle for GPU0: 0000:03:00.0: Unknown Error",
        "NVRM: GPU 0000:03:00.0: GPU has fallen off the bus.",
        "NVRM: GPU at PCI:0000:03:00 has fallen off the bus.",
    ],
)
def test_a_gpu_that_is_lost(text: str) -> None:
    (fact,) = kernel(text)
    assert isinstance(fact, Trouble)
    assert (fact.kind, fact.gpu) == ("gpu-lost", "03:00")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15", "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "Out of memory warning threshold set", "python3 invoked oom-killer: gfp_mask=0xcc0",
    ],
)  # fmt: skip
def test_machines_other_lines_say_nothing(text: str) -> None:
    assert kernel(text) == []


DESCRIBE = """\
Name:             job-worker-3
Namespace:        default
Containers:
  pytorch:
    State:          Terminated
      Reason:       {reason}
      Exit Code:    {code}
    Ready:          False
    Restart Count:  0
"""


def kubernetes(text: str) -> list[Fact]:
    return read_text(KubernetesReader(), text)


@pytest.mark.parametrize(
    ("reason", "code", "signal", "status", "memory"),
    [
        ("OOMKilled", 137, "SIGKILL", None, True), ("Error", 137, "SIGKILL", None, False),
        ("Error", 143, "SIGTERM", None, False), ("Error", 1, "", 1, False),
    ],
)  # fmt: skip
def test_how_a_container_ended(reason: str, code: int, signal: str, status: int | None, memory: bool) -> None:  # noqa: FBT001
    (fact,) = kubernetes(DESCRIBE.format(reason=reason, code=code))
    assert isinstance(fact, Exited)
    assert (fact.who.host, fact.signal, fact.code, fact.memory) == ("job-worker-3", signal, status, memory)


def test_a_container_that_ended_well_and_an_exit_code_in_a_log_say_nothing() -> None:
    assert kubernetes(DESCRIBE.format(reason="Completed", code=0)) == []
    assert kubernetes("Exit Code: 1\nreason: none\n") == []


def test_a_table_of_pods() -> None:
    (killed, evicted) = kubernetes("job-worker-1   0/1   OOMKilled   0   12m\njob-worker-2   0/1   Evicted   0   12m\n")
    assert isinstance(killed, Exited)
    assert (killed.who.host, killed.memory) == ("job-worker-1", True)
    assert isinstance(evicted, Trouble)


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


def read_frameworks(text: str) -> list[Fact]:
    return read_text(FrameworkReader(), text)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("2026-03-09 14:02:11 INFO train: step 30 loss 4.1", 30), ("step=31, loss=3", 31), ("Step: 7/100 loss 2", 7),
        (" iteration       48/     500 | consumed samples: 1 | number of skipped iterations:   0 | number of nan "
         "iterations:   0 |", 48),
        ("Epoch 3: loss 2.1", None), (" 40%|####      | 40/100 [00:10<00:15,  4.00it/s, loss=2]", 40),
        ("{'loss': 0.52, 'grad_norm': 1.2, 'learning_rate': 1e-05, 'epoch': 0.3}", None), ("iter 12 | loss 3", 12),
    ],
)  # fmt: skip
def test_progress(text: str, step: int | None) -> None:
    (fact,) = read_frameworks(text)
    assert isinstance(fact, Moving)
    assert fact.step == step


def test_only_the_last_progress_of_each_rank_is_told() -> None:
    facts = read_frameworks("".join(f"[rank{n % 2}]: step {n}\n" for n in range(100)))
    assert [(fact.who.rank, fact.step) for fact in facts if isinstance(fact, Moving)] == [(0, 98), (1, 99)]


def test_progress_before_a_new_launch_belongs_before_it() -> None:
    reader = FrameworkReader()
    first = read_text(reader, "step 3\n")
    assert len(first) == 1
    start = "Setting OMP_NUM_THREADS environment variable for each process to be 1\n"
    facts = read_frameworks(f"step 3\n{start}step 1\n")
    assert [fact.step for fact in facts if isinstance(fact, Moving)] == [3, 1]


@pytest.mark.parametrize(
    "text",
    [
        "`Trainer.fit` stopped: `max_epochs=3` reached.", "{'train_runtime': 12.1, 'train_samples_per_second': 3}",
        "Training completed. Do not forget to share your model on huggingface.co/models =)",
    ],
)  # fmt: skip
def test_a_good_end(text: str) -> None:
    (fact,) = read_frameworks(text)
    assert isinstance(fact, Finished)


SILENT = [
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
    "[rank1]:[W309 ProcessGroupNCCL.cpp:4115] [PG ID 0 PG GUID 0 Rank 1]  using GPU 1 as device used by this process is "
    "currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.",
    "UserWarning: Grad strides do not match bucket view strides. This may indicate grad was not created",
    "Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters",
    "n1:1:1 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so), using internal implementation",
    "n1:1:1 [0] NCCL INFO NET/IB : No device found.",
    "n1:1:1 [0] NCCL INFO Could not find real path of /sys/class/pci_bus/0000:00",
    "n1:1:1 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0",
    "Guessing device ID based on global rank. This can cause a hang if rank to GPU mapping is heterogeneous.",
    "[I309 reducer.cpp:1] Reducer buckets have been rebuilt in this iteration.",
    "[W309 socket.cpp:752] [c10d] The IPv6 network addresses of (localhost, 29500) cannot be retrieved",
    "resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown",
    "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.",
    "The actor is dead because its worker process has died. There are some potential root causes. (1) The process is "
    "killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called.",
    "No available shared memory broadcast block found in 60 seconds.",
    "Watchdog TokenizerManager is started", "GLOBAL_RANK: 0, MEMBER: 1/2", "[launch.py:10:main] Killing subprocess 411",
    "Resuming from checkpoint at step 300", "num_steps: 500", "error at step 3", "train.py --max-steps 300", "interest 3",
]  # fmt: skip


@pytest.mark.parametrize("text", SILENT)
def test_what_is_harmless_says_nothing(text: str) -> None:
    assert read_frameworks(text) == []
    noted = [fact for fact in read_text(NcclLogReader(), text) if not isinstance(fact, Hint | NcclPaths | Seen)]
    assert noted == []


DEEPSPEED = """\
[2026-03-09 14:02:01,123] [INFO] [launch.py:256:main] process 410 spawned with command: ['python', '-u', 'train.py', \
'--local_rank=0', '--token', 'x']
[2026-03-09 14:02:01,123] [INFO] [launch.py:256:main] process 411 spawned with command: ['python', '-u', 'train.py', \
'--local_rank=1']
[2026-03-09 14:03:01,123] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 410
[2026-03-09 14:03:01,123] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 411
[2026-03-09 14:03:01,123] [ERROR] [launch.py:325:sigkill_handler] ['python', '-u', 'train.py', '--local_rank=1'] exits \
with return code = {code}
"""


@pytest.mark.parametrize(("code", "signal", "status"), [(-9, "SIGKILL", None), (1, "", 1), (-11, "SIGSEGV", None)])
def test_deepspeeds_launcher_says_that_one_ended_and_not_which(code: int, signal: str, status: int | None) -> None:
    facts = read_frameworks(DEEPSPEED.format(code=code))
    assert [(fact.who.pid, fact.who.local_rank) for fact in facts if isinstance(fact, Seen)] == [(410, 0), (411, 1)]
    (end,) = [fact for fact in facts if isinstance(fact, Exited)]
    assert (end.who.local_rank, end.who.rank, end.signal, end.code) == (None, None, signal, status)


@pytest.mark.parametrize(
    ("before", "rank"),
    [("", 0), ("nnodes=1, num_local_procs=1, node_rank=0", 0), ("nnodes=2, num_local_procs=1, node_rank=1", None)],
)
def test_a_launcher_with_one_process_means_that_one(before: str, rank: int | None) -> None:
    head = f"[2026-03-09 14:02:01,123] [INFO] [launch.py:151:main] {before}\n" if before else ""
    alone = DEEPSPEED.format(code=1).replace("--local_rank=1", "--local_rank=0")
    assert [fact.who.rank for fact in read_frameworks(head + alone) if isinstance(fact, Exited)] == [rank]


def test_zero3_in_another_order_is_a_hint() -> None:
    (fact,) = read_frameworks("Invalidate trace cache @ step 1: expected module 15, but got module 313")
    assert isinstance(fact, Hint)


TABLE = """\
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid 4711 on n1 device  0 [0x07] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     8388608       2097152     float     sum      -1   167.2   50.17   94.07      0   166.9   50.26   94.24    {wrong}
    16777216       4194304     float     sum      -1   264.1   63.53  119.11    N/A   263.7   63.62  119.29    N/A
# Out of bounds values : {bounds}
# Avg bus bandwidth    : 106.678
"""


def test_a_good_table_is_a_note() -> None:
    fact, end = read_text(NcclTestsReader(), TABLE.format(wrong=0, bounds="0 OK"))
    assert isinstance(end, Finished)
    assert isinstance(fact, Hint)
    assert fact.words == "all_reduce_perf: bus bandwidth 106.678 GB/s on average, at most 119.29 at 16777216 bytes"


@pytest.mark.parametrize(
    "text", [TABLE.format(wrong=4, bounds="1 FAILED"), TABLE.format(wrong=4, bounds="").split("# Out")[0]]
)
def test_wrong_results_are_a_fault(text: str) -> None:
    (fact, *_) = read_text(NcclTestsReader(), text)
    assert isinstance(fact, Trouble)
    assert (fact.kind, "8388608 bytes" in fact.problem) == ("wrong-data", True)


def test_the_end_of_a_process_is_no_end_of_the_training() -> None:
    (fact,) = read_frameworks(
        "Warning: WARNING: destroy_process_group() was not called before program exit, which can leak.\n"
    )
    assert isinstance(fact, Finished)
    assert fact.process_only


def test_from_which_line_on_there_is_steady_progress() -> None:
    facts = [fact for fact in read_frameworks("".join(f"step {n}\n" for n in range(10))) if isinstance(fact, Moving)]
    assert [fact.steady_from for fact in facts] == [7]
    facts = [fact for fact in read_frameworks("step 3\nstep 3\nstep 4\nstep 5\n") if isinstance(fact, Moving)]
    assert [fact.steady_from for fact in facts] == [None]
