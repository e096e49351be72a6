"""Jobs of which NCCL's RAS tells: who is behind, who is only ahead, and when the job moves."""

import json
import re

import pytest

from tests.evidence_texts import interleaved, pyspy, steps, text, watchdog, work
from tests.rules.evidence.truths import ABSENT, Truth, hold

RAS = """\
NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      {nodes}          {per}            1         {all}       {all}

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         {nodes}         {per}        {all}        {all}   RUNNING  {errors}

Errors
======

{wrong}
Warnings
========

{warnings}
"""


def ras(errors="MISMATCH", warnings="", wrong="", *, nodes=4, per=8):
    return RAS.format(nodes=nodes, per=per, all=nodes * per, errors=errors, warnings=warnings, wrong=wrong)


def test_ras_names_those_that_are_ahead(tmp_path):
    """nccl 1911: 30 at 640, and the two that are named are ahead of them."""
    warnings = """\
#0-0 (6e1f2c9a7d001122) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 (NVML 4) managed by process 323032 on node 10.137.190.124
  Rank 13 -- GPU 5 (NVML 5) managed by process 323033 on node 10.137.190.124
"""
    truth = Truth(kinds=(*ABSENT, "mismatch"), not_ranks=(12, 13), or_cannot_tell=True, collect=("ncclras",))
    hold(tmp_path, ras(warnings=warnings), truth)


def test_ras_of_older_nccl_names_a_rank_that_launched_nothing(tmp_path):
    warnings = """\
#0-0 (6e1f2c9a7d001122) MISMATCH
  Communicator ranks have different collective operation counts
  31 ranks have launched up to operation 12
  Rank 9 has not launched any operations -- GPU 1 managed by process 41209 on node 10.0.3.2
"""
    hold(tmp_path, ras(warnings=warnings), Truth(kinds=ABSENT, ranks=(9,), hosts_within=("10.0.3.2",)))


def test_ras_with_absurd_ranks_is_damaged(tmp_path):
    """nccl 1762: NCCL 2.27.3 prints memory that was never set."""
    warnings = """\
#0-0 (6e1f2c9a7d001122) MISMATCH
  Communicator ranks have different AllReduce operation counts
  31 ranks have launched up to operation 640
  Rank 1057455228 has launched up to operation 17 -- GPU 4 managed by process 323032 on node 10.137.190.124
"""
    hold(tmp_path, ras(warnings=warnings), Truth(not_ranks=(1057455228,), collect=("ncclras",)))


def test_ras_that_says_ok_during_a_hang(tmp_path):
    """nccl 1730: equal counts, and torch timed out: inside the network, or on a device."""
    files = {
        "ras.txt": ras("OK", nodes=1, per=4),
        "job.log": interleaved(*(watchdog(rank, work(2398459)) for rank in range(4))),
    }
    hold(tmp_path, files, Truth(kinds=("transport",), ranks=(), or_cannot_tell=True, collect=("dmesg|NCCL_DEBUG",)))


def test_ras_says_that_a_process_is_dead(tmp_path):
    wrong = """\
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 41207 on node 10.0.3.2 managing GPU 3

#0-0 (6e1f2c9a7d001122) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 7
"""
    truth = Truth(kinds=("killed",), ranks=(7,), confidence=("medium",), says=("dead",))
    hold(tmp_path, ras("INCOMPLETE", wrong=wrong, nodes=2, per=4), truth)


def test_ras_hears_nothing_of_a_rank_that_it_does_not_call_dead(tmp_path):
    wrong = """\
INCOMPLETE
  Missing communicator data from 1 job process
  Process 41207 on node 10.0.3.2 managing GPU 3

#0-0 (6e1f2c9a7d001122) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 7
"""
    hold(tmp_path, ras("INCOMPLETE", wrong=wrong, nodes=2, per=4), Truth(kinds=("stuck",), ranks=(7,)))


def ras_json(counts: dict[int, int], missing: dict[int, bool] | None = None) -> str:
    def one(rank: int, **more):
        return {
            "rank": rank,
            "host": f"10.0.3.{1 + rank // 4}",
            "pid": 41200 + rank,
            "cuda_dev": rank % 4,
            "nvml_dev": rank % 4,
            **more,
        }

    ranks = [
        one(
            rank,
            status={
                "init_state": 0,
                "async_error": 0,
                "finalize_called": False,
                "destroy_flag": False,
                "abort_flag": False,
            },
            collective_counts={"Broadcast": 2, "Reduce": 0, "AllGather": 10, "ReduceScatter": 10, "AllReduce": number},
        )
        for rank, number in counts.items()
    ]
    lost = [one(rank, status={"unresponsive": True, "considered_dead": dead}) for rank, dead in (missing or {}).items()]
    comm = {
        "hash": "0x6e1f2c9a7d",
        "size": len(ranks) + len(lost),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(lost),
        "ranks": ranks,
        "missing_ranks": lost,
    }
    return json.dumps(
        {
            "nccl_version": "2.28.7",
            "cuda_runtime_version": 12090,
            "communicators": [comm],
            "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
        }
    )


def test_ras_json_with_one_behind(tmp_path):
    counts = dict.fromkeys(range(8), 5120) | {7: 5119}
    hold(tmp_path, {"ras.json": ras_json(counts)}, Truth(kinds=ABSENT, ranks=(7,), hosts_within=("10.0.3.2",)))


def test_ras_json_with_a_dead_rank(tmp_path):
    counts = dict.fromkeys(range(7), 5120)
    hold(tmp_path, {"ras.json": ras_json(counts, {7: True})}, Truth(kinds=("killed",), ranks=(7,), says=("dead",)))
    hold(tmp_path, {"ras.json": ras_json(counts, {7: False})}, Truth(kinds=("stuck",), ranks=(7,)))


@pytest.mark.parametrize("after", ["pid", "host", "cuda_dev", "unresponsive", "}"])
def test_json_of_nccl_2_28_9_lacks_a_comma_where_a_rank_is_missing(tmp_path, after):
    plain = json.dumps(json.loads(ras_json(dict.fromkeys(range(6), 5120), {6: True, 7: True})), indent=2)
    head, missing = plain.split('"missing_ranks":')
    damaged = re.sub(
        r"\},(\s*\{)" if after == "}" else rf'("{after}": [^,]+),', r"}\1" if after == "}" else r"\1", missing
    )
    assert damaged != missing
    report = hold(tmp_path, {"ras.json": f'{head}"missing_ranks":{damaged}'}, Truth(kinds=("killed",), ranks=(6, 7)))
    assert not report.data["evidence"]["not_read"]


DIAG = "w1:4242 NCCL DIAG "
FINE = [
    "NCCL DIAG === NCCL Diagnostics ===",
    f"{DIAG}[OK]   p2p: all 56 directed GPU P2P edges verified",
    f"{DIAG}=== RAS Diagnostics ===",
    f"{DIAG}[OK]   GPU inventory: 8x NVIDIA H100 per node consistent across 8 ranks in comm 0x12ab",
    f"{DIAG}[INFO] ECC: unavailable via NVML across 8 ranks in comm 0x12ab",
    f"{DIAG}[INFO] p2p: temporarily enabled context-wide CUDA peer access rank=3 cudaDev=3; avoid concurrent CUDA use",
    f"{DIAG}RAS diagnostics completed in 12.3 ms across 8 RAS peers",
]


@pytest.mark.parametrize(
    ("line", "truth"),
    [
        (
            "p2p: write mismatch srcRank=3 srcCudaDev=3 srcNvmlDev=3 dstRank=5 dstCudaDev=5 dstNvmlDev=5 path=NVL "
            "handle=CUMEM_FABRIC expected=0x01 got=0x02 verify=0x02; inspect the links",
            Truth(kinds=("transport",), ranks=(), hosts=(), says=("GPU 3", "GPU 5", "write mismatch")),
        ),
        (
            "p2p: only 52/56 GPU-to-GPU peer accesses passed verification",
            Truth(kinds=("transport",), ranks=(), says=("52 of 56",)),
        ),
        (
            "NVLink: inactive link(s) on rank(s) {2} across 8 ranks in comm 0x12ab",
            Truth(kinds=("transport",), says=("rank 2",)),
        ),
        (
            "ECC: uncorrected volatile errors on rank(s) {6} (worst=2) across 8 ranks in comm 0x12ab",
            Truth(kinds=("xid",), ranks=(6,), says=("ECC",)),
        ),
    ],
    ids=["edge", "edges", "links", "memory"],
)
def test_what_nccls_diagnostics_find(tmp_path, line, truth):
    hold(tmp_path, text([*FINE, f"{DIAG}[INFO] {line}", *steps(3)]), truth)


def test_nccls_diagnostics_that_find_nothing(tmp_path):
    hold(tmp_path, text([*FINE, *steps(3), "`Trainer.fit` stopped: `max_epochs=1` reached."]), Truth(silent=True))


def test_variables_that_differ_are_named_without_their_values(tmp_path):
    log = [
        *FINE,
        f"{DIAG}[INFO] NCCL environment: mismatch across 8 ranks in comm 0x12ab for NCCL_BUFFSIZE",
        f"{DIAG}[INFO] NCCL environment: NCCL_BUFFSIZE=secret4711 on rank(s) {{0,1,2,3}}",
        f"{DIAG}[INFO] NCCL environment: diagnostics incomplete, gathered 7/8 ranks in comm 0x1/0x2/0x3",
        *interleaved(*(watchdog(rank, work(9)) for rank in range(4))).splitlines(),
    ]
    report = hold(
        tmp_path, text(log), Truth(kinds=("transport",), ranks=(), or_cannot_tell=True, never_says=("secret4711",))
    )
    notes = "\n".join(report.data["evidence"]["notes"])
    assert "NCCL_BUFFSIZE differs between ranks" in notes
    assert "7/8 ranks" in notes


def test_ras_json_of_a_job_that_moves(tmp_path):
    first, second = (
        ras_json(dict.fromkeys(range(8), 5120) | {7: 5119}),
        ras_json(dict.fromkeys(range(8), 5190) | {3: 5189}),
    )
    hold(tmp_path, {"ras.json": first + "\n" + second}, Truth(silent=True))


def test_ras_text_between_lines_of_a_log(tmp_path):
    warnings = """\
#0-0 (6e1f2c9a7d001122) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 5120
  Rank 2 has launched up to operation 5119 -- GPU 2 managed by process 41202 on node 10.0.3.1
"""
    log = text(steps(9)) + ras(warnings=warnings, nodes=2, per=4) + text(steps(1, 10)[:0])
    hold(tmp_path, log, Truth(kinds=ABSENT, ranks=(2,)))


def behind(rank: int, number: int) -> str:
    return ras(
        nodes=2,
        per=4,
        warnings=f"""\
#0-0 (6e1f2c9a7d001122) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation {number + 1}
  Rank {rank} has launched up to operation {number} -- GPU 3 managed by process 41207 on node 10.0.3.2
""",
    )


def test_two_files_of_ras_of_a_job_that_moves(tmp_path):
    hold(tmp_path, {"ras_1.txt": behind(7, 5119), "ras_2.txt": behind(3, 5190)}, Truth(silent=True))


def test_two_files_of_ras_of_which_the_second_is_fine(tmp_path):
    hold(tmp_path, {"ras_1.txt": behind(7, 5119), "ras_2.txt": ras("OK", nodes=2, per=4)}, Truth(silent=True))


def test_two_files_of_ras_of_a_job_that_stands(tmp_path):
    truth = Truth(kinds=ABSENT, ranks=(7,), confidence=("medium", "high"))
    hold(tmp_path, {"ras_1.txt": behind(7, 5119), "ras_2.txt": behind(7, 5119)}, truth)


def test_two_files_of_ras_of_which_the_first_is_fine(tmp_path):
    """It hangs since."""
    hold(
        tmp_path,
        {"ras_1.txt": ras("OK", nodes=2, per=4), "ras_2.txt": behind(7, 5119)},
        Truth(kinds=ABSENT, ranks=(7,)),
    )


def test_all_ran_into_the_limit_and_one_never_launched(tmp_path):
    """DSpark 132: torch has it in its queue on all ranks; the device of rank 3 did not come to it."""
    files = {"ras.txt": behind(3, 70), "job.log": interleaved(*(watchdog(rank, work(71)) for rank in range(8)))}
    hold(tmp_path, files, Truth(kinds=ABSENT, ranks=(3,)))


def test_ras_and_the_watchdog_contradict_each_other(tmp_path):
    """Counts of launches are stronger than the silence of a watchdog; both are told."""
    logs = [watchdog(rank, work(71)) for rank in range(8) if rank != 2]
    logs.append([f"[rank2]: {line}" for line in steps(3)])
    truth = Truth(kinds=ABSENT, ranks=(5,), confidence=("low",), says=("a weaker source disagrees",))
    hold(tmp_path, {"ras.txt": behind(5, 70), "job.log": interleaved(*logs)}, truth)


def test_ras_names_a_rank_that_is_still_in_its_start(tmp_path):
    warnings = """\
#0-0 (6e1f2c9a7d001122) MISMATCH
  Communicator ranks have different status
  31 ranks have status RUNNING
  Rank 3 has status INIT -- GPU 3 managed by process 323 on node 10.0.0.1
"""
    hold(tmp_path, ras(warnings=warnings), Truth(kinds=ABSENT, ranks=(3,), confidence=("low",)))


def test_ras_names_a_rack_that_is_behind(tmp_path):
    """marin 7344: all stacks are alike and tell nothing; the counts of one rack are one lower."""
    named = "".join(
        f"  Rank {rank} -- GPU {rank % 8} managed by process 3230{rank} on node 10.0.0.2\n" for rank in range(8, 16)
    )
    warnings = f"""\
#0-0 (6e1f2c9a7d001122) MISMATCH
  Communicator ranks have different AllReduce operation counts
  24 ranks have launched up to operation 640
  8 ranks have launched up to operation 639
{named}"""
    stacks = {
        f"rank{rank}.txt": pyspy(500 + rank, "train_step (train.py:70)", "main (train.py:99)") for rank in range(4)
    }
    hold(
        tmp_path,
        {"ras.txt": ras(warnings=warnings), **stacks},
        Truth(kinds=ABSENT, ranks=tuple(range(8, 16)), confidence=("low",)),
    )
