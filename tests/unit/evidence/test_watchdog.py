"""What ProcessGroupNCCL's watchdog writes, in all versions of torch, and what must not be made of it."""

from typing import Any

import pytest

from ddpdoctor.evidence.watchdog import WatchdogReader
from ddpdoctor.model.evidence import Absent, Differ, Failed, Hint, Link, Nature, Reached, Size, Trouble, Waiting, Who
from tests.unit.evidence.feeding import feed, only, told

WORK = "WorkNCCL(SeqNum=71, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000)"
CAUGHT = f"Watchdog caught collective operation timeout: {WORK} ran for 600011 milliseconds before timing out."
DIED = f"Process group watchdog thread terminated with exception: [Rank 2] {CAUGHT}"
HEAD = "[E309 14:12:11.043947946 ProcessGroupNCCL.cpp:684] "
FULL = {"op": "all_reduce", "seq": 71, "numel_in": 1024, "numel_out": 1024}
VERSIONS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (
        "2.0",
        f"[E ProcessGroupNCCL.cpp:828] [Rank 2] {CAUGHT}".replace(
            "NumelIn=1024, NumelOut=1024", "TensorShape=[32, 32]"
        ),
        {"group_rank": 2},
        {"op": "all_reduce", "seq": 71, "shape": (32, 32)},
    ),
    (
        "2.2",
        f"""
        [E ProcessGroupNCCL.cpp:475] [Rank 2] {CAUGHT}
        [E ProcessGroupNCCL.cpp:489] Some NCCL operations have failed or timed out.
        [E ProcessGroupNCCL.cpp:495] To avoid data inconsistency, we are taking the entire process down.
        [E ProcessGroupNCCL.cpp:916] [Rank 2] NCCL watchdog thread terminated with exception: [Rank 2] {CAUGHT}
        """,
        {"group_rank": 2},
        FULL,
    ),
    (
        "2.3",
        f"""
        [rank6]:[E ProcessGroupNCCL.cpp:563] [Rank 2] {CAUGHT}
        [rank6]:[E ProcessGroupNCCL.cpp:1537] [PG 3 Rank 2] Timeout at NCCL work: 71, last enqueued NCCL work: 72, \
last completed NCCL work: 70.
        [rank6]:[E ProcessGroupNCCL.cpp:1182] [PG 3 Rank 2] {DIED}
        """,
        {"rank": 6, "group": "3", "group_rank": 2},
        {**FULL, "group": "3", "group_words": "PG 3"},
    ),
    (
        "2.4",
        f"""
        [rank2]:{HEAD}[Rank 2] {CAUGHT}
        [rank2]:{HEAD}[PG 0 (default_pg) Rank 2] Exception (either an error or timeout) detected by watchdog at work: \
71, last enqueued NCCL work: 71, last completed NCCL work: 70.
        [rank2]:{HEAD}[PG 0 (default_pg) Rank 2] {DIED}
        """,
        {"rank": 2, "group_rank": 2},
        {**FULL, "group_words": "default_pg"},
    ),
    (
        "2.5",
        f"""
        [rank7]:{HEAD}[Rank 3] {CAUGHT}
        [rank7]:{HEAD}[PG ID 2 PG GUID 9 Rank 3] Exception (either an error or timeout) detected by watchdog at work: \
71, last enqueued NCCL work: 71, last completed NCCL work: 70.
        [rank7]:{HEAD}[PG ID 2 PG GUID 9 Rank 3] Timeout at NCCL work: 71, last enqueued NCCL work: 71, \
last completed NCCL work: 70.
        [rank7]:{HEAD}[PG ID 2 PG GUID 9 Rank 3] {DIED}
        """,
        {"rank": 7, "group": "9", "group_rank": 3},
        {**FULL, "group": "9", "group_words": "PG GUID 9"},
    ),
    (
        "2.6",
        f"""
        [rank2]:{HEAD}[Rank 2] {CAUGHT}
        [rank2]:{HEAD}[PG ID 1 PG GUID 4(dp) Rank 1]  failure detected by watchdog at work sequence id: 71 PG status: \
last enqueued work: 71, last completed work: 70
        [rank2]:{HEAD}Stack trace of the failed collective not found, potentially because FlightRecorder is disabled.
        """,
        {"rank": 2, "group": "4", "group_rank": 1},
        {**FULL, "group": "4", "group_words": "PG GUID 4 (dp)"},
    ),
    (
        "2.15 nccl2",
        f"""
        {HEAD}[TC][rank=3][name=dp] Watchdog caught collective operation timeout: NCCL operation timed out
        {HEAD}[TC][rank=3][name=dp] Aborting process on rank 3 due to timeout - timeout watchdog detected operation timeout
        """,
        {"group": "dp", "group_rank": 3},
        {},
    ),
]


@pytest.mark.parametrize(
    ("text", "who", "operation"), [case[1:] for case in VERSIONS], ids=[case[0] for case in VERSIONS]
)
def test_a_time_limit_is_one_fact_with_its_group(text: str, who: dict[str, Any], operation: dict[str, Any]) -> None:
    (waiting,) = only(Waiting, feed(WatchdogReader(), text))
    assert waiting.timed_out
    assert told(waiting.who) == who
    assert {k: v for k, v in told(waiting.operation).items() if k in operation} == operation


@pytest.mark.parametrize(
    ("text", "rank", "group", "size"),
    [
        ("[PG ID 0 PG GUID 0 Rank 3] ProcessGroupNCCL initialization options: size: 16, global rank: 3, TIMEOUT(ms): 9, "
         "USE_HIGH_PRIORITY_STREAM: 0, SPLIT_FROM: 0, SPLIT_COLOR: 0, PG Name: 0", 3, "", 16),
        ("[PG ID 0 PG GUID 0 Rank 3] ProcessGroupNCCL initialization options: size: 16, global rank: 3, TIMEOUT(ms): 9",
         3, "", 16),
        ("[PG ID 2 PG GUID 7(tp) Rank 1] ProcessGroupNCCL initialization options: size: 4, global rank: 5, TIMEOUT(ms): "
         "600000, USE_HIGH_PRIORITY_STREAM: 0, SPLIT_FROM: 0, SPLIT_COLOR: 0, PG Name: 7", 5, "7", 4),
    ],
)  # fmt: skip
def test_the_start_of_a_group_says_its_size(text: str, rank: int, group: str, size: int) -> None:
    seen, of = feed(WatchdogReader(), f"[rank{rank}]:[I309 14:02:51.1 ProcessGroupNCCL.cpp:900] {text}")
    assert isinstance(of, Size)
    assert (seen.who.rank, of.group, of.ranks) == (rank, group, size)


@pytest.mark.parametrize(
    ("kept", "operation"),
    [
        (slice(1, 2), {"seq": 71, "group": "4", "group_words": "PG GUID 4 (dp)"}),
        (slice(1, None), {**FULL, "group": "4", "group_words": "PG GUID 4 (dp)"}),
    ],
    ids=["only the numbers", "all but the line of the limit"],
)
def test_the_line_of_the_limit_may_be_lacking(kept: slice, operation: dict[str, Any]) -> None:
    lines = VERSIONS[5][1].strip().splitlines()
    lines += [f"[rank2]:{HEAD}[PG ID 1 PG GUID 4(dp) Rank 1] {DIED}"]
    (waiting,) = only(Waiting, feed(WatchdogReader(), "\n".join(lines[kept])))
    assert (waiting.who.rank, waiting.timed_out, told(waiting.operation)) == (2, True, operation)


@pytest.mark.parametrize(
    ("end", "lacks"),
    [("OpTy", {"op", "numel_in", "numel_out"}), ("NumelOut=10", {"numel_in", "numel_out"}), ("SeqNum=7", None)],
)
def test_a_line_that_is_cut_says_what_is_left_of_it(end: str, lacks: set[str] | None) -> None:
    cut = CAUGHT[: CAUGHT.index(end) + len(end)]
    waits = only(Waiting, feed(WatchdogReader(), f"[rank2]:{HEAD}[Rank 2] {cut}"))
    left = [{key: value for key, value in FULL.items() if key not in lacks}] if lacks is not None else []
    assert [told(wait.operation) for wait in waits] == left


def test_the_numbers_of_a_group_are_how_far_a_rank_has_come() -> None:
    (reached,) = only(Reached, feed(WatchdogReader(), VERSIONS[5][1]))
    assert told(reached) == {
        "who": Who(rank=2, group="4", group_rank=1), "group": "4", "group_words": "PG GUID 4 (dp)",
        "enqueued": 71, "completed": 70,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "enqueued", "completed"),
    [
        ("last enqueued NCCL work: 5, last completed NCCL work: 76280750235782912.", 5, None),
        ("last enqueued NCCL work: -1, last completed NCCL work: -1.", 0, None),
        ("last enqueued NCCL work: 39, last started work: 19 (_ALLGATHER_BASE), last completed NCCL work: 17.", 39, 17),
    ],
)
def test_memory_that_was_never_set_is_no_number(numbers: str, enqueued: int | None, completed: int | None) -> None:
    text = f"[rank0]:{HEAD}[PG 0 Rank 0] Timeout at NCCL work: 5, {numbers}"
    (reached,) = only(Reached, feed(WatchdogReader(), text))
    assert reached.enqueued == enqueued
    assert (reached.completed or None) == completed


def test_the_numbers_of_a_dump_signal_are_those_of_the_default_group() -> None:
    text = f"""
    [rank5]:{HEAD}[PG ID 2 PG GUID 7 Rank 1] Received a dump signal due to a collective timeout from  rank 2 and we will \
try our best to dump the debug info. Last enqueued NCCL work: 2289, last completed NCCL work: 2288.This is most likely
    """
    reached, hint = feed(WatchdogReader(), text)
    assert isinstance(hint, Hint)
    assert "rank 2 " in hint.words
    assert told(reached) == {
        "who": Who(rank=5), "group_words": "default_pg", "enqueued": 2289, "completed": 2288, "told_by": 2
    }  # fmt: skip


def test_the_stack_of_the_failed_collective_goes_to_its_rank() -> None:
    text = f"""
    [rank1]:{HEAD}[Rank 1] {CAUGHT}
    [rank0]:{HEAD}[Rank 0] {CAUGHT}
    [rank1]:{HEAD}[PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected by watchdog at work sequence id: 71 PG status: \
last enqueued work: 71, last completed work: 70
    [rank0]:{HEAD}[PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 71 PG status: \
last enqueued work: 71, last completed work: 70
    [rank1]:{HEAD}Stack trace of the failed collective:
    #0 all_reduce from /opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2806
    #1 step from /home/me/train.py:40
    #2 main from /home/me/train.py:90

    [rank0]:{HEAD}Stack trace of the failed collective:
    #0 all_reduce from /opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2806
    #1 evaluate from /home/me/eval.py:7
    [rank0]:{HEAD}[PG ID 0 PG GUID 0(default_pg) Rank 0] {DIED}
    """
    waits = {wait.who.rank: wait for wait in only(Waiting, feed(WatchdogReader(), text))}
    assert [(f.function, f.line, f.user) for f in waits[1].frames] == [
        ("main", 90, True), ("step", 40, True), ("all_reduce", 2806, False),
    ]  # fmt: skip
    assert [f.function for f in waits[0].frames] == ["evaluate", "all_reduce"]


def test_interleaved_stacks_of_two_ranks_are_told_apart_by_their_numbers() -> None:
    def status(rank: int) -> str:
        return (
            f"[rank{rank}]:{HEAD}[Rank {rank}] {CAUGHT}\n[rank{rank}]:{HEAD}[PG ID 0 PG GUID 0(default_pg) Rank {rank}]  "
            "failure detected by watchdog at work sequence id: 71 PG status: last enqueued work: 71, last completed "
            f"work: 70\n[rank{rank}]:{HEAD}Stack trace of the failed collective: \n"
        )

    text = f"{status(0)}#0 one from /a.py:1\n{status(1)}#0 two from /b.py:1\n#1 two_outer from /b.py:2\n#1 one_outer from /a.py:2"
    waits = {wait.who.rank: wait for wait in only(Waiting, feed(WatchdogReader(), text))}
    assert {len(wait.frames) for wait in waits.values()} == {2}


def test_two_groups_of_a_rank_time_out_each_for_itself() -> None:
    other = CAUGHT.replace("SeqNum=71", "SeqNum=12").replace("ALLREDUCE", "_ALLGATHER_BASE")
    text = f"""
    [rank2]:{HEAD}[Rank 2] {CAUGHT}
    [rank2]:{HEAD}[Rank 2] {other}
    [rank2]:{HEAD}[PG ID 1 PG GUID 5(tp) Rank 0]  failure detected by watchdog at work sequence id: 12 PG status: \
last enqueued work: 12, last completed work: 11
    [rank2]:{HEAD}[PG ID 0 PG GUID 0(default_pg) Rank 2]  failure detected by watchdog at work sequence id: 71 PG status: \
last enqueued work: 71, last completed work: 70
    """
    waits = only(Waiting, feed(WatchdogReader(), text))
    assert {(w.operation.words(), w.who.group_rank) for w in waits} == {
        ("all_reduce #71 of default_pg", 2), ("all_gather_into_tensor #12 of PG GUID 5 (tp)", 0),
    }  # fmt: skip


def test_a_cause_in_the_middle_of_a_progress_bar_and_colors_is_found() -> None:
    text = f" 71%|███▌  | 71/100 [00:01<00:01]\r 72%|███▌  | 72/100 \x1b[31m[rank3]:{HEAD}[Rank 3] {CAUGHT}\x1b[0m"
    (waiting,) = only(Waiting, feed(WatchdogReader(), text))
    assert waiting.operation.seq == 71


def test_a_run_after_a_restart_may_fail_at_the_same_number() -> None:
    text = f"""
    [rank2]:{HEAD}[Rank 2] {CAUGHT}
    [default] Worker group FAILED. 3/3 attempts left; will restart worker group
    [rank2]:{HEAD}[Rank 2] {CAUGHT}
    """
    assert [wait.spot.line for wait in only(Waiting, feed(WatchdogReader(), text))] == [1, 3]
    reader, facts = WatchdogReader(), []
    for part in text.strip().split("\n")[:2]:
        facts += feed_open(reader, part)
    assert only(Waiting, facts), "what was held back comes before the restart"


def feed_open(reader: WatchdogReader, text: str) -> list[Any]:
    from ddpdoctor.evidence.lines import split_line

    return list(reader.read(split_line(text.strip(), 1, "job.log")))


@pytest.mark.parametrize(
    ("error", "kind", "nature", "memory"),
    [
        ("CUDA error: an illegal memory access was encountered", "CUDA error", Nature.OWN, False),
        ("CUDA error: out of memory", "CUDA error", Nature.OWN, True),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "NCCL error", Nature.FOLLOWS, False),
        (
            "NCCL error: remote process exited or there was a network error, NCCL version 2.21.5\n"
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
            "Last error:\nsocketProgress: Connection closed by remote peer node7<41000>",
            "NCCL error", Nature.PEER_LOST, False,
        ),
        (
            "NCCL error: unhandled system error, NCCL version 2.21.5\nncclSystemError: System call failed.\n"
            "Last error:\nConnect to 10.0.0.2<41001> failed : Connection refused",
            "NCCL error", Nature.FOLLOWS, False,
        ),
        (
            "NCCL error: unhandled system error, NCCL version 2.21.5\nncclSystemError: System call failed.\n"
            "Last error:\nError: failed to extend /dev/shm/nccl-x to 9637892 bytes, error: No space left on device (28)",
            "NCCL error", Nature.FOLLOWS, False,
        ),
    ],
)  # fmt: skip
def test_errors_that_the_watchdog_found(error: str, kind: str, nature: Nature, memory: object) -> None:
    text = f"[rank4]:{HEAD}[PG ID 0 PG GUID 0(default_pg) Rank 4] Process group watchdog thread terminated with exception: {error}"
    (failed,) = only(Failed, feed(WatchdogReader(), text))
    assert (failed.type, failed.nature, failed.memory, failed.who.rank) == (kind, nature, memory, 4)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Connect to 10.0.0.2<41001> failed : Connection refused", Link),
        ("Error: failed to extend /dev/shm/nccl-x to 9637892 bytes, error: No space left on device (28)", Trouble),
    ],
)
def test_nccls_own_words_behind_an_error_are_the_cause(words: str, kind: type) -> None:
    text = f"[rank4]:{HEAD}[PG 0 Rank 4] Process group watchdog thread terminated with exception: NCCL error: x\nLast error:\n{words}"
    (cause,) = only(kind, feed(WatchdogReader(), text))
    assert cause.who.rank == 4


def test_the_peer_of_a_lost_connection_is_named() -> None:
    text = (
        f"[rank4]:{HEAD}[PG 0 Rank 4] Process group watchdog thread terminated with exception: NCCL error: remote process "
        "exited or there was a network error, NCCL version 2.21.5\nLast error:\nConnection closed by remote peer n7<41000>"
    )
    (failed,) = only(Failed, feed(WatchdogReader(), text))
    assert failed.peer_hosts == ("n7",)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"{HEAD}[PG 0 Rank 4] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress", "watchdog-stuck"),
        (f"{HEAD}[PG 0 Rank 4] Heartbeat monitor timed out! Process will be terminated after dumping debug info. "
         "workMetaList_.size()=121", "watchdog-stuck"),
        (f"{HEAD}[PG 0 Rank 4] Could not acquire GIL within 300 ms on exit, possible GIL induced hang", "gil"),
    ],
)  # fmt: skip
def test_a_watchdog_that_is_stuck_is_a_hint(text: str, kind: str) -> None:
    (hint,) = feed(WatchdogReader(), f"[rank4]:{text}")
    assert isinstance(hint, Hint)
    assert (hint.kind, hint.who.rank) == (kind, 4)


def test_a_store_that_is_gone_makes_a_victim_only() -> None:
    text = f'[rank4]:{HEAD}[PG 0 Rank 4] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut'
    (link,) = feed(WatchdogReader(), text)
    assert isinstance(link, Link)
    assert link.victim
    assert link.to.rank == 0


DESYNC = f"""
[rank0]:{HEAD}[PG ID 0 PG GUID 0(default_pg) Rank 0] Timeout report
     - [0] Timeout at collective: ALLREDUCE, #52
"""


def test_a_desync_report_names_ranks_that_never_came() -> None:
    text = f"""{DESYNC}
     - To our best knowledge, ranks [2, 3] are the lagging ranks that caused this timeout. They never joined any collectives
    """
    absent = only(Absent, feed(WatchdogReader(), text))
    assert [(one.who.rank, one.operation.words(), one.certain) for one in absent] == [
        (2, "all_reduce #52 of default_pg", True), (3, "all_reduce #52 of default_pg", True),
    ]  # fmt: skip


def test_a_desync_report_names_ranks_that_stayed_behind() -> None:
    text = f"""{DESYNC}
     - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
       - [1] joined but didn't finish collective #51 (count from 1)
         [3] finished collective #51, but didn't join collective #52 (count from 1)
     - Snapshot of ranks' latest states:
       #51 started ranks:
         [1] started ALLREDUCE
       #51 finished ranks:
         [3] finished ALLREDUCE
       #52 started ranks:
         [0, 2] started ALLREDUCE
    """
    facts = feed(WatchdogReader(), text)
    assert {(one.who.rank, one.operation.seq, one.certain) for one in only(Absent, facts)} == {
        (1, 52, False),
        (3, 52, True),
    }
    assert not only(Differ, facts)


def test_all_ranks_inside_one_collective_are_no_suspects() -> None:
    text = f"""{DESYNC}
     - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
       - [0, 1, 2, 3] joined but didn't finish collective #52 (count from 1)
    """
    assert not only(Absent, feed(WatchdogReader(), text))


def test_a_snapshot_with_two_operations_of_one_number_is_a_difference() -> None:
    text = f"""{DESYNC}
     - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
       - [0, 1, 2, 3] joined but didn't finish collective #52 (count from 1)
     - Snapshot of ranks' latest states:
       #52 started ranks:
         [0, 1, 3] started ALLREDUCE
         [2] started BROADCAST
    [rank0]:{HEAD}[Rank 0] To avoid data inconsistency, we are taking the entire process down.
    """
    (differ,) = only(Differ, feed(WatchdogReader(), text))
    assert (differ.odd, differ.aspect) == ((2,), "operation")
    assert [(ranks, side.op) for ranks, side in differ.sides] == [((0, 1, 3), "all_reduce"), ((2,), "broadcast")]


@pytest.mark.parametrize(
    "text",
    [
        "[rank0]:[W309 14:02:51.1 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called before "
        "program exit, which can leak resources. (function operator())",
        "h1:20100:20100 [0] NCCL INFO Watchdog caught nothing",
        "[rank1]:[W ProcessGroupNCCL.cpp:1856] [PG 0 Rank 1]  using GPU 1 to perform barrier as devices used by this process "
        "are currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.",
        "Watchdog caught collective operation timeout: WorkNC",
    ],
)
def test_healthy_and_cut_lines_yield_nothing(text: str) -> None:
    assert feed(WatchdogReader(), text) == []


def test_a_secret_in_a_line_is_not_quoted() -> None:
    text = f"WANDB_API_KEY=abcdef0123456789abcdef0123456789abcdef01 [rank3]:{HEAD}[Rank 3] {CAUGHT}"
    (waiting,) = only(Waiting, feed(WatchdogReader(), text))
    assert "abcdef0123" not in waiting.said
