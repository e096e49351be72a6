"""A rank that works is busy, shown with what it does; whoever waits in vain is not, whatever else its process does."""

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import Blocked, FileLock, LostChild, ProcessCauses, Receiving, Work, WorkingChild
from ddpdoctor.model.findings import Confidence
from tests.rules.build import LONG_AGO, NOW, S, in_call, in_user, job, line
from tests.rules.test_stopping import limited

LOW, MEDIUM, HIGH = Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH
FEW, MANY = 10_000.0, 40_000_000.0


def work(cores=0.0, wanted=None, read=0.0, written=0.0):
    return Work(over_s=2.0, cores=cores, wanted=wanted, read_bytes_s=read, written_bytes_s=written)


def child(**done):
    return WorkingChild(pid=77, name="gcc -O2 a.c", work=work(**done))


def found(causes, **more):
    (finding,) = judge(job(in_call(0), in_user(1, line(12, "tokenize"), causes=causes, **more), in_call(2))).findings
    return finding


BUSY = {
    "computes": (ProcessCauses(work=work(0.97)), "has used 97% of a core for 60 s", LOW),
    "computes in many threads": (ProcessCauses(work=work(7.6)), "has used 97% of a core for 60 s", LOW),
    "computes on a crowded machine": (
        ProcessCauses(work=work(0.1, 0.95)), "has used 97% of a core for 60 s", LOW,
    ),
    "reads": (ProcessCauses(work=work(0.05, read=MANY)), "reads 40 MB/s", MEDIUM),
    "reads a file": (
        ProcessCauses(work=work(0.05, read=MANY), blocked=Blocked(call="read", file="/data/a.bin")),
        "reads 40 MB/s from a.bin",
        MEDIUM,
    ),
    "writes": (ProcessCauses(work=work(0.05, written=2_500_000.0)), "writes 2.5 MB/s", MEDIUM),
    "downloads": (
        ProcessCauses(work=work(), receiving=Receiving(remote="10.0.0.4:443", bytes_s=MANY)),
        "receives 40 MB/s from 10.0.0.4:443",
        MEDIUM,
    ),
    "its child computes": (
        ProcessCauses(work=work(), working_children=(child(cores=1.0),)),
        "its child gcc -O2 a.c (process 77) uses 100% of a core",
        MEDIUM,
    ),
    "its child computes on a crowded machine": (
        ProcessCauses(work=work(), working_children=(child(cores=0.1, wanted=0.9),)),
        "its child gcc -O2 a.c (process 77) wants 90% but gets 10% of a core",
        MEDIUM,
    ),
    "its child copies": (
        ProcessCauses(work=work(), working_children=(child(cores=0.1, written=MANY),)),
        "its child gcc -O2 a.c (process 77) writes 40 MB/s",
        MEDIUM,
    ),
}  # fmt: skip
VAIN = {
    "sleeps": ProcessCauses(work=work()),
    "polls": ProcessCauses(work=work(0.02, 0.05, read=FEW)),
    "has a child that idles": ProcessCauses(work=work(), working_children=(child(cores=0.12, read=FEW),)),
    "waits for a lock while a thread computes": ProcessCauses(
        work=work(0.9),
        waits_for_lock=FileLock(path="/data/lock", kind="flock", holder_pid=9, holder="python train.py"),
    ),
    "waits for input while a thread computes": ProcessCauses(
        work=work(0.9), blocked=Blocked(call="read", alone_on_fd0=True)
    ),
    "nobody looked for long enough": ProcessCauses(busy_cores=0.9),
}


@pytest.mark.parametrize("name", BUSY)
def test_a_rank_that_works_is_busy(name):
    causes, said, confidence = BUSY[name]
    finding = found(causes, cpu_share=0.97 if "comput" in said or "used" in said else 0.0)
    sentence = said if said.startswith("its child") else f"it {said}"
    assert finding.summary == (
        f"rank 1 is busy in tokenize (train.py:12): {sentence}; ranks 0 and 2 are waiting for it in all_reduce"
    )
    assert (finding.kind, finding.ranks, finding.confidence) == ("stuck", (1,), confidence)
    assert finding.evidence[0].startswith(f"rank 1: {said}")
    assert "before init_process_group" in finding.fix


@pytest.mark.parametrize("name", VAIN)
def test_a_rank_that_waits_in_vain_is_not(name):
    finding = found(VAIN[name], cpu_share=0.9)
    assert finding.summary.startswith("rank 1 is stuck in tokenize (train.py:12);")
    assert finding.confidence is HIGH


def test_a_dead_child_is_what_it_waits_for_though_it_computes():
    lost = LostChild(pid=9, name="python", signal="SIGKILL")
    finding = found(
        ProcessCauses(work=work(0.9), lost_children=(lost,), blocked=Blocked(call="read", file="pipe")), cpu_share=0.9
    )
    assert "is stuck" in finding.summary


def test_work_is_measured_of_now_and_not_of_the_past():
    assert "is stuck" in found(ProcessCauses(work=work(0.01, 0.02)), cpu_share=0.9).summary


def test_the_fix_says_for_how_long_torch_waits():
    ranks = (limited(in_call(0), 1800.0), in_user(1, causes=ProcessCauses(work=work(0.97))), in_call(2))
    (finding,) = judge(job(*ranks)).findings
    assert "if the others must wait more than 30 min, raise the group's timeout" in finding.fix


def test_ranks_that_compute_while_nobody_waits_are_left_in_peace_for_four_hang_timeouts():
    causes = ProcessCauses(work=work(0.97))
    patient = judge(job(*(in_user(n, causes=causes, last_progress_ns=NOW - 30 * S) for n in range(3))))
    assert patient.findings == ()
    (finding,) = judge(job(*(in_user(n, causes=causes, last_progress_ns=LONG_AGO) for n in range(3)))).findings
    assert (finding.ranks, finding.confidence) == ((0, 1, 2), MEDIUM)
    assert finding.summary == "ranks 0-2 are busy in read_batch (train.py:12); no rank is waiting for another"


def test_a_busy_rank_is_never_stopped_unasked():
    ranks = (in_call(0), in_user(1, causes=ProcessCauses(work=work(0.97))), in_call(2))
    judged = judge(job(*ranks))
    assert (judged.certain, judged.proven) == (True, False)
