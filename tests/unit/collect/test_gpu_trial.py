"""The trial: what is asked, in which order, and what becomes of children that fail."""

import json

import pytest

from ddpdoctor.collect.child import ChildEnd
from ddpdoctor.collect.gpu.trial import PROBE, read_gpu_trial, run_child, try_gpus
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.system import System
from ddpdoctor.model.gpus import GpuWork, PeerCopy
from ddpdoctor.model.reading import NotRead, Why
from tests import forking
from tests.scenarios.running import clean_environment

GOOD = {"ok": True, "error": None, "seconds": 3.5}


def answers(**said):
    """Return what runs a child, with an answer for each of its arguments."""

    def run(arguments, _limit_s):
        return said["_".join(arguments).replace(":", "_")]

    return run


def ended(*results, status=0, err=""):
    return ChildEnd(out="".join(json.dumps(result) + "\n" for result in results), err=err, status=status)


def test_without_deep_nothing_is_asked(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_gpu_trial(System(root=tmp_path), ReadingPlan(sections=frozenset()))
    assert missing.value.unread.why is Why.NOT_ASKED
    assert "--deep" in missing.value.unread.reason


def test_deep_without_a_gpu(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_gpu_trial(System(root=tmp_path), ReadingPlan(sections=frozenset(), deep=True))
    assert missing.value.unread.why is Why.ABSENT


def test_all_gpus_and_all_pairs():
    copy = {"source": 0, "target": 1, "ok": True, "error": None, "gb_s": 150.0}
    trial = try_gpus(
        answers(count=ended({"count": 2}), work_cuda_0=ended(GOOD), work_cuda_1=ended(GOOD), copies=ended(copy))
    )
    assert trial.work == tuple(GpuWork(index=n, timed_out=False, **GOOD) for n in (0, 1))
    assert trial.copies == (PeerCopy(**copy),)


def test_one_that_hangs_and_one_that_crashes():
    trial = try_gpus(
        answers(
            count=ended({"count": 3}),
            work_cuda_0=ended(GOOD),
            work_cuda_1=ended(status=None),
            work_cuda_2=ended(status=-11, err="warning\nSegmentation fault\n"),
        )
    )
    assert [(one.ok, one.timed_out, one.error) for one in trial.work] == [
        (True, False, None),
        (False, True, "no result within 60 s"),
        (False, False, "Segmentation fault"),
    ]
    assert trial.copies == ()


def test_copies_that_hang():
    trial = try_gpus(
        answers(count=ended({"count": 2}), work_cuda_0=ended(GOOD), work_cuda_1=ended(GOOD), copies=ended(status=None))
    )
    assert [copy.error for copy in trial.copies] == ["no copy was done within 120 s"]


@pytest.mark.parametrize(
    ("status", "error"), [(None, "this copy was not done within 120 s"), (-11, "Xid 31"), (0, None)]
)
def test_a_pair_that_hangs_or_crashes_after_others_were_copied(status, error):
    good = ended({"source": 0, "target": 1, "ok": True, "error": None, "gb_s": 9.0}, status=status, err="Xid 31")
    trial = try_gpus(answers(count=ended({"count": 2}), work_cuda_0=ended(GOOD), work_cuda_1=ended(GOOD), copies=good))
    failed = [(one.source, one.target, one.error) for one in trial.copies if not one.ok]
    assert failed == ([(1, 0, error)] if error else [])


@pytest.mark.parametrize(
    ("count", "why"),
    [(ended({"count": 0}), Why.ABSENT), (ended(status=None), Why.TIMEOUT), (ended(status=1, err="boom"), Why.ERROR)],
)
def test_gpus_that_cannot_be_counted(count, why):
    with pytest.raises(NotRead) as missing:
        try_gpus(answers(count=count))
    assert missing.value.unread.why is why


def test_the_real_child_counts():
    said = forking.run("-m", PROBE, "count", env=clean_environment(CUDA_VISIBLE_DEVICES=""))
    assert json.loads(said.stdout) == {"count": 0}, said.stderr


def test_the_real_child_works_on_the_cpu():
    said = run_child(PROBE, ("work", "cpu"), {}, 100.0)
    result = json.loads(said.out)
    assert (result["ok"], result["error"]) == (True, None)


def test_a_device_that_is_not_there_is_an_error_in_words():
    said = forking.run("-m", PROBE, "work", "cuda:0", env=clean_environment(CUDA_VISIBLE_DEVICES=""))
    result = json.loads(said.stdout) if said.stdout else {"ok": False, "error": said.stderr}
    assert not result["ok"]
    assert result["error"]
