"""Jobs of which ProcessGroupNCCL's watchdog tells: who is late, who called something else, and what cannot be told."""

import pickle

import pytest

from tests.evidence_texts import (
    caught,
    dump_signal,
    gloo_timeout,
    interleaved,
    nccl2_timeout,
    old_watchdog,
    steps,
    text,
    watchdog,
    work,
)
from tests.flight_dumps import Recorder
from tests.rules.evidence.truths import ABSENT, Truth, hold

LATE_OR_OTHER = (*ABSENT, "mismatch")


@pytest.mark.parametrize("torch", ["2.3", "2.4", "2.5", "2.6", "2.13"])
def test_the_rank_that_was_told_to_dump_one_behind_is_the_late_one(tmp_path, torch):
    those = [watchdog(rank, work(2290), torch=torch) for rank in (0, 1, 3)]
    late = dump_signal(2, 1, 2289, 2289)
    hold(tmp_path, text(steps(30)) + interleaved(*those, late), Truth(kinds=ABSENT, ranks=(2,), not_ranks=(0, 1, 3)))


def at(minute: int, lines: list[str]) -> list[str]:
    """Return the lines as of another minute of that hour; the first ranks ran into their limits at 12."""
    return [line.replace(" 14:12:", f" 14:{minute}:") for line in lines]


LATE = "rank 2 (may have )?c[ao]me too late to all_reduce #6"
TOLD = at(13, dump_signal(2, 0, 5, 5))
INSIDE = Truth(kinds=("transport",), ranks=(), or_cannot_tell=True, never_says=("too late", "did not call"))


@pytest.mark.parametrize(
    ("last", "truth"),
    [
        pytest.param(
            [*TOLD, *at(41, watchdog(2, work(8)))],
            Truth(
                kinds=("stuck",),
                ranks=(2,),
                confidence=("medium",),
                says=(LATE, "rank 2 had completed collective #5"),
                never_says=("different calls",),
            ),
            id="it completed two calls more, as those who had waited could not leave them",
        ),
        pytest.param(
            at(41, watchdog(2, work(8))),
            Truth(kinds=("stuck",), ranks=(2,), confidence=("low",), says=(LATE,)),
            id="the line in which it was told is lacking",
        ),
        pytest.param(
            at(41, watchdog(2, work(6))),
            Truth(kinds=("stuck",), ranks=(2,), confidence=("medium",), says=(LATE,)),
            id="the others had gone when it came",
        ),
        pytest.param(
            [*at(13, dump_signal(2, 0, 6, 5)), *at(21, watchdog(2, work(6)))],
            INSIDE,
            id="it came nine minutes after them, before their limit",
        ),
        pytest.param(
            at(41, [line.replace("600048", "1760048") for line in watchdog(2, work(6))]),
            INSIDE,
            id="it had come with them, and its watchdog was stuck",
        ),
        pytest.param(
            [*TOLD, *at(41, watchdog(2, work(6, "BROADCAST")))],
            Truth(kinds=("mismatch",), ranks=(2,)),
            id="it came late, and to another call",
        ),
    ],
)
def test_a_rank_that_comes_after_the_limit_is_not_compared_by_numbers(tmp_path, last, truth):
    waits = [watchdog(rank, work(6)) for rank in (0, 1, 3)]
    hold(tmp_path, interleaved(*waits) + text(last), truth)


def bucket_and_barrier() -> dict[str, str | bytes]:
    """Rank 0 reduces a bucket, to which no Python led; rank 1 is in the barrier after its loop."""
    frames = ["barrier from /opt/torch/distributed/distributed_c10d.py:6364", "main from /workspace/run/train.py:70"]
    stack = [f"#{at} {frame}" for at, frame in enumerate(frames)]
    logs = [watchdog(0, work(4, numel=577)), watchdog(1, work(4, numel=1), stack=stack)]
    files: dict[str, str | bytes] = {"err.txt": interleaved(*logs)}
    for rank, op in enumerate(["all_reduce", "all_reduce_barrier"]):
        recorder = Recorder(rank, 2)
        for _ in range(3):
            recorder.call(size=(577,))
        recorder.call(op, size=(577,) if rank == 0 else (1,), state="scheduled")
        for entry in recorder.entries[: 4 if rank == 0 else 3]:
            entry.update(frames=[], thread_name="pt_autograd_0")
        files[f"nccl_trace_rank_{rank}"] = pickle.dumps(recorder.body())
    return files


SIDES = {
    "log": ("err.txt", "rank 0: all_reduce #4 of default_pg of 577 elements; rank 1: barrier #4 of default_pg"),
    "dumps": (
        "nccl_trace",
        "rank 0: all_reduce #4 of default_pg of [577] float32 in backward; rank 1: barrier #4 of default_pg",
    ),
}  # fmt: skip


@pytest.mark.parametrize("given", ["log", "dumps", "both"])
def test_each_side_is_named_once_and_by_what_made_it(tmp_path, given):
    begins, sides = SIDES["dumps" if given == "both" else given]
    files = bucket_and_barrier()
    kept = {name: content for name, content in files.items() if given == "both" or name.startswith(begins)}
    report = hold(tmp_path, kept, Truth(kinds=("mismatch",), ranks=(0, 1), confidence=("medium",)))
    assert report.verdict is not None
    assert report.verdict.summary == f"the ranks made different calls: {sides}"
    assert "they differ in: operation" in report.verdict.evidence


def test_a_barrier_of_which_one_rank_has_no_stack_is_no_difference(tmp_path):
    stack = ["#0 barrier from /opt/torch/distributed/distributed_c10d.py:6364"]
    logs = [watchdog(0, work(4, numel=1)), watchdog(1, work(4, numel=1), stack=stack)]
    hold(tmp_path, interleaved(*logs), INSIDE)


@pytest.mark.parametrize("torch", ["2.1", "2.2"])
def test_old_torch_with_all_ranks_but_one(tmp_path, torch):
    """Rank 3 wrote only its steps, with the label of srun."""
    logs = [[f"{rank}: {line}" for line in (*steps(20), *old_watchdog(rank, work(512), torch))] for rank in range(3)]
    logs.append([f"3: {line}" for line in steps(20)])
    hold(tmp_path, interleaved(*logs), Truth(kinds=ABSENT, ranks=(3,)))


def test_numbers_that_are_rubbish_say_nothing(tmp_path):
    """torch 2.3 prints memory that was never set for a group that has completed nothing."""
    those = [watchdog(rank, work(1), torch="2.3", completed="76280750235782912") for rank in range(4)]
    truth = Truth(kinds=("transport",), ranks=(), or_cannot_tell=True, collect=("NCCL_DEBUG|dmesg|ncclras",))
    hold(tmp_path, interleaved(*those), truth)


def test_a_dump_signal_has_the_numbers_of_the_default_group(tmp_path):
    """Ranks 0 to 3 timed out in a group of their own; nobody ever used the default group: -1 says nothing."""
    group = "PG ID 1 PG GUID 3(tp)"
    those = [watchdog(rank, work(77), group=group) for rank in range(4)]
    others = [dump_signal(rank, 0, -1, -1) for rank in range(4, 8)]
    truth = Truth(kinds=("transport",), ranks=(), or_cannot_tell=True)
    hold(tmp_path, interleaved(*those, *others), truth)


def test_group_ranks_are_no_global_ranks(tmp_path):
    """Ranks 12 to 15 are the ranks 0 to 3 of their group; 14 is the rank 2 of it, and came late."""
    group = "PG ID 2 PG GUID 9(tp)"
    those = [watchdog(rank, work(88), group=group, group_rank=rank - 12) for rank in (12, 13, 15)]
    late = [
        "[rank14]:[E309 14:12:13.000000076 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 14] Received a dump signal due to a collective timeout from  rank 12 and we will try our best to dump the debug info. Last enqueued NCCL work: 5, last completed NCCL work: 5.This is most likely caused by incorrect usages of collectives"
    ]
    hold(tmp_path, interleaved(*those, late), Truth(kinds=LATE_OR_OTHER, ranks=(14,)))


def test_two_groups_with_one_guid_are_not_compared(tmp_path):
    """dp 0 has the ranks 0 and 1, dp 1 the ranks 2 and 3; each group is inside its own call."""
    group = "PG ID 1 PG GUID 1(dp)"
    logs = [watchdog(rank, work(50 if rank < 2 else 61), group=group, group_rank=rank % 2) for rank in range(4)]
    truth = Truth(kinds=("transport",), ranks=(), or_cannot_tell=True)
    hold(tmp_path, interleaved(*logs), truth)


def test_the_bare_rank_may_be_that_of_another_group(tmp_path):
    """ "[Rank 1]" is the rank in the group of the process's first work, on all lines of the process."""
    logs = [watchdog(rank, work(2290), spoken=rank % 2) for rank in range(4)]
    truth = Truth(kinds=("transport",), ranks=(), or_cannot_tell=True)
    hold(tmp_path, interleaved(*logs), truth)


def test_another_operation_at_the_same_number(tmp_path):
    logs = [watchdog(rank, work(90)) for rank in (0, 1, 3)]
    logs.append(watchdog(2, work(90, "_ALLGATHER_BASE", 1024, 4096)))
    hold(tmp_path, interleaved(*logs), Truth(kinds=("mismatch",), ranks=(2,)))


def test_another_size_at_the_same_number(tmp_path):
    logs = [watchdog(rank, work(90, numel=2048)) for rank in (1, 2, 3)]
    logs.append(watchdog(0, work(90, numel=4096)))
    hold(tmp_path, interleaved(*logs), Truth(kinds=("mismatch",), ranks=(0,)))


def test_a_rank_that_is_ahead_skipped_a_call(tmp_path):
    """ms-swift 10183: it is ahead because it made other calls, not because it is fast."""
    logs = [watchdog(rank, work(7219, "BROADCAST", 64)) for rank in (0, 1, 2)]
    logs.append(watchdog(3, work(7221, "ALLREDUCE", 24084544)))
    truth = Truth(kinds=LATE_OR_OTHER, ranks=(3,), says=("7219", "7221"))
    hold(tmp_path, interleaved(*logs), truth)


def test_two_against_two_blame_no_side_alone(tmp_path):
    logs = [watchdog(rank, work(90, numel=2048 if rank < 2 else 4096)) for rank in range(4)]
    truth = Truth(kinds=("mismatch",), ranks=(0, 1, 2, 3), confidence=("low", "medium"))
    hold(tmp_path, interleaved(*logs), truth)


def test_gathered_sizes_may_differ_by_intent(tmp_path):
    """all_to_all with uneven splits has other sizes on each rank."""
    logs = [watchdog(rank, work(90, "ALLTOALL_BASE", 100 + rank, 200 - rank)) for rank in range(4)]
    truth = Truth(kinds=("transport",), ranks=(), or_cannot_tell=True)
    hold(tmp_path, interleaved(*logs), truth)


def test_all_inside_and_equal_is_the_network_or_a_device(tmp_path):
    logs = [watchdog(rank, work(71)) for rank in range(8)]
    truth = Truth(
        kinds=("transport",),
        ranks=(),
        hosts=(),
        collect=("dmesg", "NCCL_DEBUG"),
        confidence=("low",),
        or_cannot_tell=True,
    )
    hold(tmp_path, interleaved(*logs), truth)


def test_all_inside_by_the_sizes_of_a_gather(tmp_path):
    """The elements in and out show that the group has four ranks, so that none is lacking."""
    logs = [watchdog(rank, work(71, "_ALLGATHER_BASE", 1000, 4000)) for rank in range(4)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("transport",), ranks=(), hosts=(), confidence=("low",)))


def test_one_file_a_rank_and_one_rank_without_a_limit(tmp_path):
    files = {f"logs/rank_{rank}.log": text([*steps(9), *watchdog(rank, work(71))]) for rank in (0, 1, 3)}
    files["logs/rank_2.log"] = text(steps(9))
    hold(tmp_path, files, Truth(kinds=ABSENT, ranks=(2,)))


def test_half_of_the_logs_name_nobody(tmp_path):
    """64 ranks in the group by the sizes of the gather; the logs of 4 were given, all inside."""
    call = work(71, "_ALLGATHER_BASE", 1000, 64000)
    files = {f"rank_{rank}.log": text(watchdog(rank, call)) for rank in range(4)}
    hold(tmp_path, files, Truth(collect=("other ranks",)))


def test_an_old_log_of_one_rank(tmp_path):
    truth = Truth(collect=("all other ranks",), not_ranks=(2,))
    hold(tmp_path, text([*steps(5), *old_watchdog(2, work(6463))]), truth)


def test_numbers_of_several_groups_of_old_torch_are_not_compared(tmp_path):
    """pytorch 118369: rank 0 prints many numbers, rank 7 others."""
    logs = [old_watchdog(0, work(seq)) for seq in (1021, 88, 420)] + [old_watchdog(7, work(seq)) for seq in (12, 3055)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("transport",), ranks=(), or_cannot_tell=True))


def test_nccl2_says_only_who_timed_out(tmp_path):
    logs = [[*steps(5), *nccl2_timeout(rank)] for rank in range(4)]
    truth = Truth(kinds=("transport",), ranks=(), or_cannot_tell=True, collect=("NCCL_DEBUG|ncclras|dmesg",))
    hold(tmp_path, interleaved(*logs), truth)


def test_nccl2_with_a_rank_that_said_nothing_of_a_limit(tmp_path):
    files = {f"rank{rank}.log": text([*steps(5), *nccl2_timeout(rank)]) for rank in (0, 1, 3)}
    files["rank2.log"] = text(steps(5))
    truth = Truth(kinds=ABSENT, ranks=(2,), or_cannot_tell=True, not_ranks=(0, 1, 3))
    hold(tmp_path, files, truth)


def test_errors_after_the_limit_are_consequences(tmp_path):
    """The others abort: a remote error and "more than 1EB" follow within seconds, on the ranks that waited."""
    logs = [watchdog(rank, work(300)) for rank in (0, 1, 3)]
    logs[0] += [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/workspace/run/train.py", line 61, in main',
        "[rank0]:     loss.backward()",
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
    ]
    logs[1] += [
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.27.3",
        "[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ]
    logs.append(dump_signal(2, 0, 299, 299))
    hold(tmp_path, interleaved(*logs), Truth(kinds=ABSENT, ranks=(2,)))


def test_a_cuda_error_that_the_watchdog_found_is_the_ranks_own(tmp_path):
    """An earlier kernel of rank 3 failed; the others lost it."""
    died = "[rank3]:[E309 14:12:11.019022791 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered"
    logs = [[*steps(5), *watchdog(rank, work(300))] for rank in range(3)]
    own = [
        *steps(5),
        died,
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    ]
    truth = Truth(kinds=("crash",), ranks=(3,), says=("illegal memory access",))
    hold(tmp_path, interleaved(own, *logs), truth)


def test_the_watchdog_was_blocked_itself(tmp_path):
    """It ran far longer than its limit: the numbers are good all the same."""
    head = "[rank{}]:[E309 14:12:11.019022791 ProcessGroupNCCL.cpp:632] "
    logs = []
    for rank in (0, 2):
        lines = watchdog(rank, work(71))
        lines[0] = f"{head.format(rank)}[Rank {rank}] {caught(work(71), 1_800_300)}"
        logs.append(lines)
    logs.append(dump_signal(1, 0, 70, 70))
    hold(tmp_path, interleaved(*logs), Truth(kinds=ABSENT, ranks=(1,)))


def test_the_stack_of_the_call_is_told(tmp_path):
    stack = [
        "#0 all_reduce from /opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2806",
        "#1 wrapper from /opt/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py:83",
        "#2 sync_metrics from /workspace/run/metrics.py:31",
    ]
    logs = [watchdog(rank, work(71), stack=stack) for rank in (0, 1, 2)]
    logs.append(dump_signal(3, 0, 70, 70))
    hold(tmp_path, interleaved(*logs), Truth(kinds=ABSENT, ranks=(3,), says=("metrics.py:31",)))


DESYNC = """\
[rank0]:[E309 14:12:11.019022791 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] {caught}
\t - [0] Timeout at collective: ALLREDUCE, #52
\t - To our best knowledge, {words}
\t - To our best knowledge, ranks [0, 1] are ahead
\t - Snapshot of ranks' latest states:
\t   #52 started ranks:
\t     [0, 1] started ALLREDUCE
"""


@pytest.mark.parametrize(
    "words",
    [
        "ranks [2, 3] are the lagging ranks that caused this timeout. They never joined any collectives",
        "the lagging/dead/mismatched ranks that caused the desync are:\n\t   - [2, 3] finished collective #51, but didn't join collective #52 (count from 1)",
    ],
)
def test_a_desync_report_names_the_late_ones(tmp_path, words):
    logs = text(line for rank in (0, 1) for line in watchdog(rank, work(52)))
    truth = Truth(kinds=ABSENT, ranks=(2, 3), not_ranks=(0, 1))
    hold(tmp_path, logs + DESYNC.format(caught=caught(work(52)), words=words), truth)


def test_a_file_with_two_runs_judges_the_last(tmp_path):
    """The first run failed on rank 1; the second, after the restart, waits for rank 0."""
    first = [
        "NCCL version 2.27.3+cuda12.9",
        *steps(5),
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/workspace/run/train.py", line 40, in main',
        "[rank1]:     scale = 1 / n_valid",
        "[rank1]: ZeroDivisionError: division by zero",
    ]
    second = ["NCCL version 2.27.3+cuda12.9", *steps(5)]
    logs = [watchdog(rank, work(88)) for rank in (1, 2, 3)]
    late = dump_signal(0, 1, 87, 87)
    content = text(first) + text(second) + interleaved(*logs, late)
    hold(tmp_path, content, Truth(kinds=ABSENT, ranks=(0,)))


def test_messages_in_the_middle_of_a_bar_with_colors(tmp_path):
    bars = "".join(
        f"\rEpoch 1:  {share}%|██▏       | {share}/100 [00:{share:02}<01:10,  1.28it/s]" for share in range(5, 30)
    )
    logs = []
    for rank in (0, 1, 3):
        lines = watchdog(rank, work(88))
        logs.append([f"{bars}\x1b[31m{lines[0]}\x1b[0m", *lines[1:]])
    logs.append([bars, *dump_signal(2, 0, 87, 87)])
    hold(tmp_path, interleaved(*logs), Truth(kinds=ABSENT, ranks=(2,)))


def test_a_number_that_is_lower_but_of_another_group_is_no_delay(tmp_path):
    """All ranks of tp 0 wait; rank 2 had completed all its calls and is told to dump."""
    logs = [watchdog(rank, work(71), group="PG ID 1 PG GUID 1(tp)") for rank in (0, 1)]
    logs += [dump_signal(rank, 0, 12, 12) for rank in (2, 3)]
    truth = Truth(kinds=("transport",), ranks=(), or_cannot_tell=True, not_ranks=(2, 3))
    hold(tmp_path, interleaved(*logs), truth)


def test_a_rank_that_completed_later_calls_made_other_calls(tmp_path):
    """It cannot complete number 55 of a group whose other ranks wait in number 50."""
    logs = [watchdog(rank, work(50)) for rank in (0, 1, 2)]
    hold(tmp_path, interleaved(*logs, dump_signal(3, 0, 55, 55)), Truth(kinds=("mismatch",), ranks=(3,)))


def test_a_rank_that_completed_the_same_call_is_not_accused_of_another(tmp_path):
    """The last part of an all_reduce may be lost on its way to the others."""
    logs = [watchdog(rank, work(50)) for rank in (0, 1, 2)]
    hold(
        tmp_path,
        interleaved(*logs, dump_signal(3, 0, 50, 50)),
        Truth(not_ranks=(0, 1, 2), kinds=("stuck", "transport"), or_cannot_tell=True),
    )


def test_only_ranks_that_were_told_to_dump(tmp_path):
    """Rank 5 ran into a limit, and its log is lacking."""
    logs = [dump_signal(rank, 5, 9, 9) for rank in range(4)]
    hold(tmp_path, interleaved(*logs), Truth(collect=("rank 5", "other ranks")))


def test_watchdogs_that_are_stuck_and_nothing_else(tmp_path):
    """ms-swift 7992."""
    head = "[rank{0}]:[E309 14:12:11.019022791 ProcessGroupNCCL.cpp:1870] [PG ID 12 PG GUID 99(ep) Rank {0}] "
    said = "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives."
    log = text([f"{head.format(rank)}{said}" for rank in (0, 4)])
    hold(tmp_path, log, Truth(mentions=("ranks 0 and 4: torch's watchdog thread was stuck for 480 s",)))


@pytest.mark.parametrize("lines_of", [range(4), (0, 1, 3)])
def test_plain_lines_of_all_ranks_show_that_the_log_is_whole(tmp_path, lines_of):
    """Without those of rank 2 it may only not have been pasted."""
    logs = [[f"[rank{rank}]: opened shard {rank}"] for rank in lines_of]
    logs += [watchdog(rank, work(71)) for rank in (0, 1, 3)]
    late = Truth(kinds=ABSENT, ranks=(2,), confidence=("low",))
    hold(tmp_path, interleaved(*logs), late if 2 in lines_of else Truth(collect=("other ranks",)))


def test_a_desync_report_with_two_kinds_of_late_ones(tmp_path):
    words = "the lagging/dead/mismatched ranks that caused the desync are:\n\t   - [1] joined but didn't finish collective #51 (count from 1)\n\t   - [3] finished collective #51, but didn't join collective #52 (count from 1)"
    log = text(watchdog(0, work(52))) + DESYNC.format(caught=caught(work(52)), words=words)
    hold(tmp_path, log, Truth(kinds=(*ABSENT, "mismatch"), ranks=(1, 3), not_ranks=(0, 2)))


def test_gloo_waits_for_the_rank_that_complains_of_nothing(tmp_path):
    logs = [[*(f"[rank{rank}]: {line}" for line in steps(4)), *gloo_timeout(rank)] for rank in (0, 1, 3)]
    logs.append([f"[rank2]: {line}" for line in steps(4)])
    hold(tmp_path, interleaved(*logs), Truth(kinds=ABSENT, ranks=(2,), confidence=("low",)))


def test_all_of_gloo_wait(tmp_path):
    logs = [gloo_timeout(rank) for rank in range(4)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("transport",), ranks=(), or_cannot_tell=True))


def test_numbers_that_no_job_has_take_no_memory(tmp_path):
    """A damaged line may make a group of 10**13 ranks, or a rank that no job has."""
    call = work(7, "_ALLGATHER_BASE", numel=1, out=10**13)
    those = [watchdog(rank, call, group="1", group_rank=rank) for rank in (0, 1)]
    named = [f"[rank{rank}]: world_size=999999999999, rank {rank} of 999999999999" for rank in (0, 1)]
    report = hold(tmp_path, interleaved(named, *those), Truth(kinds=("transport",), ranks=(), or_cannot_tell=True))
    assert report.data["evidence"]["world_size"] is None
