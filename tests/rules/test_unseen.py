"""Ranks that run where nobody sees them: said plainly, and never taken for a hang of those that are seen."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.progress import judge_job as judge
from ddpdoctor.model.facts import Life
from ddpdoctor.model.findings import Confidence
from tests.rules.build import in_call, in_user, job, phase, rank


def of_kind(judgment, kind):
    return [finding for finding in judgment.findings if finding.kind == kind]


def in_init(number, world):
    return rank(number, world, initialized=False, open_calls=(phase("init_process_group"),))


def test_ranks_of_a_world_that_is_larger_than_what_is_seen_are_named():
    found = judge(job(in_call(0, world=8), in_call(1, world=8), world_size=None, may_run_elsewhere=True))
    (finding,) = found.findings
    assert (finding.code, finding.ranks, finding.hosts) == ("DD901", (2, 3, 4, 5, 6, 7), ())
    assert "ranks 2-7 of 8 run on another host or in another container" in finding.summary
    assert not found.certain


def test_whoever_waits_in_init_for_unseen_ranks_is_not_stopped():
    found = judge(job(in_init(0, 3), in_init(1, 3), world_size=None, may_run_elsewhere=True))
    (missing,) = of_kind(found, "missing")
    assert (missing.ranks, missing.confidence) == ((2,), Confidence.LOW)
    assert "not seen here" in of_kind(found, "not-recorded")[0].summary
    assert not found.certain


def test_where_the_launcher_says_that_all_are_here_they_are_missing():
    found = judge(job(in_init(0, 3), in_init(1, 3), world_size=None))
    assert of_kind(found, "missing")[0].confidence is Confidence.HIGH
    assert of_kind(found, "not-recorded") == []
    assert found.certain


def test_a_silent_rank_may_wait_for_one_that_nobody_sees():
    seen, whole = (judge(job(in_user(0, world=2), world_size=None, may_run_elsewhere=more)) for more in (True, False))
    assert (of_kind(seen, "stuck")[0].confidence, seen.certain) == (Confidence.LOW, False)
    assert of_kind(whole, "not-recorded") == []


def test_a_rank_that_others_here_wait_for_is_stuck_whoever_is_elsewhere():
    found = judge(job(in_call(0, world=3), in_user(1, world=3), world_size=None, may_run_elsewhere=True))
    assert (of_kind(found, "stuck")[0].ranks, found.certain) == ((1,), True)


@pytest.mark.parametrize("waiting", [True, False])
def test_nodes_that_the_user_named_are_named_only_where_something_is_wrong(waiting):
    here = [in_call(n, world=4) if waiting else rank(n, 4, life=Life.EXITED, exit_code=0) for n in (0, 1)]
    found = judge(job(*here, world_size=4, nnodes=2, may_run_elsewhere=True))
    assert bool(of_kind(found, "not-recorded")) is waiting


def test_a_rank_that_keeps_the_recorder_out_says_why():
    kept_out = replace(rank(1, 2), recorded=False, lost="Python was started with -I, which turns off start-up hooks")
    found = judge(job(in_call(0, world=2), kept_out))
    (finding,) = of_kind(found, "not-recorded")
    assert finding.ranks == (1,)
    assert "-I" in finding.summary
    assert not found.certain


def test_what_a_torch_lacks_is_said_once_with_what_is_lost():
    ranks = [replace(in_call(n), lacks=("Work.wait",)) for n in range(3)]
    (finding,) = of_kind(judge(job(*ranks)), "not-recorded")
    assert finding.ranks == (0, 1, 2)
    assert finding.summary == (
        "ranks 0-2 could not be recorded completely: "
        "this torch has no Work.wait, so waits for asynchronous collectives are not recorded"
    )


def test_several_missing_hooks_are_one_finding_with_a_line_each():
    ranks = [replace(in_call(n), lacks=("Work.wait", "a hook of later") if n else ()) for n in range(3)]
    (finding,) = of_kind(judge(job(*ranks)), "not-recorded")
    assert finding.ranks == (1, 2)
    assert finding.evidence == (
        "Work.wait: waits for asynchronous collectives are not recorded",
        "a hook of later: its purpose is unknown",
    )


def test_a_torch_that_has_every_hook_is_not_spoken_of():
    assert of_kind(judge(job(*(in_call(n) for n in range(3)))), "not-recorded") == []


@pytest.mark.parametrize(
    ("lost", "evidence"),
    [
        ("gradients: KeyError: x", ("gradients failed, so NaN and inf in gradients are not detected",)),
        (
            "mesh step ends: KeyError: x; mesh step ends: y",
            ("mesh step ends failed, so ranks of a device mesh are not compared",),
        ),
        ("no ring could be made: No space left on device", ()),
    ],
)  # fmt: skip
def test_what_a_failing_part_costs_is_said(lost, evidence):
    (finding,) = of_kind(judge(job(in_call(0), replace(in_call(1), lost=lost), in_call(2))), "not-recorded")
    assert (finding.ranks, finding.evidence) == ((1,), evidence)
    assert ("update ddpdoctor" if evidence else "free disk space") in finding.fix
