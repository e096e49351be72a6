"""Progress and ends of trainers, DeepSpeed's launcher, and all that must stay silent."""

import pytest

from ddpdoctor.evidence.frameworks import FrameworkReader
from ddpdoctor.evidence.machines import NcclTestsReader
from ddpdoctor.evidence.nccl_log import NcclLogReader
from ddpdoctor.model.evidence import Exited, Fact, Finished, Hint, Moving, Seen, Trouble
from ddpdoctor.model.nccl_paths import NcclPaths
from tests.unit.evidence.reading_lines import read_text


def read(text: str) -> list[Fact]:
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
    (fact,) = read(text)
    assert isinstance(fact, Moving)
    assert fact.step == step


def test_only_the_last_progress_of_each_rank_is_told() -> None:
    facts = read("".join(f"[rank{n % 2}]: step {n}\n" for n in range(100)))
    assert [(fact.who.rank, fact.step) for fact in facts if isinstance(fact, Moving)] == [(0, 98), (1, 99)]


def test_progress_before_a_new_launch_belongs_before_it() -> None:
    reader = FrameworkReader()
    first = read_text(reader, "step 3\n")
    assert len(first) == 1
    start = "Setting OMP_NUM_THREADS environment variable for each process to be 1\n"
    facts = read(f"step 3\n{start}step 1\n")
    assert [fact.step for fact in facts if isinstance(fact, Moving)] == [3, 1]


@pytest.mark.parametrize(
    "text",
    [
        "`Trainer.fit` stopped: `max_epochs=3` reached.", "{'train_runtime': 12.1, 'train_samples_per_second': 3}",
        "Training completed. Do not forget to share your model on huggingface.co/models =)",
    ],
)  # fmt: skip
def test_a_good_end(text: str) -> None:
    (fact,) = read(text)
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
    assert read(text) == []
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
    facts = read(DEEPSPEED.format(code=code))
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
    assert [fact.who.rank for fact in read(head + alone) if isinstance(fact, Exited)] == [rank]


def test_zero3_in_another_order_is_a_hint() -> None:
    (fact,) = read("Invalidate trace cache @ step 1: expected module 15, but got module 313")
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
    (fact,) = read("Warning: WARNING: destroy_process_group() was not called before program exit, which can leak.\n")
    assert isinstance(fact, Finished)
    assert fact.process_only


def test_from_which_line_on_there_is_steady_progress() -> None:
    facts = [fact for fact in read("".join(f"step {n}\n" for n in range(10))) if isinstance(fact, Moving)]
    assert [fact.steady_from for fact in facts] == [7]
    facts = [fact for fact in read("step 3\nstep 3\nstep 4\nstep 5\n") if isinstance(fact, Moving)]
    assert [fact.steady_from for fact in facts] == [None]
