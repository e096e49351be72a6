"""What reports say of environments, checkpoints, options and rules."""

import json
from dataclasses import replace

import pytest

from ddpdoctor.cli.explain import render_list, render_page
from ddpdoctor.diagnose.bundle import Redactor, redact
from ddpdoctor.diagnose.files import RulePage, check_codes, checkpoint_report, find_page
from ddpdoctor.diagnose.job import job_status
from ddpdoctor.diagnose.pictures import MOST_CLASSES, fold_waits, rank_row
from ddpdoctor.diagnose.rendezvous import as_typed
from ddpdoctor.diagnose.tuning import describe_plan, order_launches, read_launch, restarts_record
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import Life
from ddpdoctor.model.findings import (
    Check,
    Confidence,
    Finding,
    JobStatus,
    Judgment,
    Outcome,
    Place,
    RankRow,
    Report,
    Severity,
)
from ddpdoctor.model.launch import NodeOptions
from ddpdoctor.model.node import Fleet, Lookup, Names
from ddpdoctor.model.reading import NotRead, Unread, Why
from ddpdoctor.model.saved import Checkpoints, Damage, FileSeen, Form, ReadState
from ddpdoctor.model.tuning import AGAIN, BASE, RestartPlan, TriedBlock
from ddpdoctor.rules import engine
from ddpdoctor.rules.answers import Problem, judged, passed, skipped
from ddpdoctor.rules.registry import CheckGroup, Rule
from tests.rules.build import NOW, S, call, crashed, error, in_backward, phase
from tests.rules.build import rank as call_rank
from tests.rules.environment.build import fleet, node, process
from tests.rules.speed.jobs import job, rank

# What a report says of checkpoint files that were read.


@pytest.mark.parametrize(
    ("state", "damaged", "said"),
    [
        (ReadState.WHOLE, (), "whole"),
        (ReadState.WHOLE, (Damage(record="data/0"),), "damaged"),
        (ReadState.CUT, (Damage(record="data/0"),), "cut off"),
    ],
)
def test_a_file_with_a_wrong_checksum_is_not_called_whole(state, damaged, said):
    seen = FileSeen(path="a.pt", size_bytes=9, form=Form.ZIP, state=state, damaged=damaged)
    report = checkpoint_report(Checkpoints(files=(seen,)), ("ddpdoctor",), "2026-01-01T00:00:00Z")
    assert [one["state"] for one in report.data["files"]] == [said]


def rule(check, *, about="Node"):
    return Rule(
        code="DD199", kind="made-up", severity=Severity.WARNING, summary="made up", begins="page",
        checks={about: check}, family="environment", group=CheckGroup.LIMITS.value,
    )  # fmt: skip


def judge(check, facts, **more):
    judged_all = engine.judge([rule(check, **more)], engine.fleet_facts(facts))
    (only,) = judged_all.checks
    return only, judged_all.findings


def test_equal_problems_of_several_hosts_are_one_finding():
    check, findings = judge(
        lambda one: judged([Problem(summary="too small", fix="grow", evidence=(one.host,))], "4"),
        fleet(node("a"), node("b")),
    )

    (finding,) = findings
    assert (finding.code, finding.kind, finding.severity) == ("DD199", "made-up", Severity.WARNING)
    assert finding.hosts == ("a", "b")
    assert (check.outcome, check.hosts, check.seen) == (Outcome.FAILED, (), "4")


def test_problems_with_another_remedy_stay_apart():
    _, findings = judge(
        lambda one: judged([Problem(summary="too small", fix=f"grow {one.host}")], "4"), fleet(node("a"), node("b"))
    )

    assert [finding.hosts for finding in findings] == [("a",), ("b",)]


def test_equal_problems_at_two_steps_of_a_job_stay_apart():
    def check_job(job):
        return judged([Problem(summary="not finite", step=step) for step in job], "2 steps")

    found = engine.judge([rule(check_job, about="tuple")], {tuple: [(3, 7)]}).findings

    assert [finding.step for finding in found] == [3, 7]


def test_the_worst_answer_counts_and_names_its_hosts():
    def check_one(one):
        return judged([Problem(summary="bad")], "3") if one.host == "b" else passed("4")

    check, findings = judge(check_one, fleet(node("a"), node("b"), node("c")))

    assert (check.outcome, check.hosts, check.seen) == (Outcome.FAILED, ("b",), "3")
    assert findings[0].hosts == ("b",)


def test_one_node_that_could_not_be_asked_does_not_hide_that_others_passed():
    check, _ = judge(lambda one: skipped("none") if one.host == "b" else passed("4"), fleet(node("a"), node("b")))

    assert (check.outcome, check.hosts) == (Outcome.PASSED, ("a",))


def raise_not_read(why):
    def check_one(_):
        raise NotRead(Unread(why=why, reason="no such thing"))

    return check_one


def test_a_missing_fact_is_skipped_and_a_broken_one_could_not_be_determined():
    for why, outcome in {
        Why.ABSENT: Outcome.SKIPPED, Why.DENIED: Outcome.SKIPPED, Why.NOT_ASKED: Outcome.SKIPPED,
        Why.NEEDLESS: Outcome.SKIPPED, Why.TIMEOUT: Outcome.INCONCLUSIVE, Why.ERROR: Outcome.INCONCLUSIVE,
    }.items():  # fmt: skip
        check, findings = judge(raise_not_read(why), fleet(node()))
        assert (check.outcome, check.reason, findings) == (outcome, "no such thing", ())


def test_a_rule_that_raises_is_a_crashed_check_and_the_others_go_on():
    def broken(_):
        raise ValueError("boom")

    judged_all = engine.judge([rule(broken), rule(lambda _: passed("well"))], engine.fleet_facts(fleet(node())))

    assert [check.outcome for check in judged_all.checks] == [Outcome.CRASHED, Outcome.PASSED]
    assert judged_all.checks[0].reason == "ValueError: boom"


def test_a_rule_over_all_nodes_is_asked_once_and_blames_whom_it_names():
    asked = []

    def check_all(facts):
        asked.append(facts)
        return judged([Problem(summary="b differs", hosts=("b",), ranks=(1,))], "two")

    check, findings = judge(check_all, fleet(node("a"), node("b")), about="Fleet")

    assert len(asked) == 1
    assert isinstance(asked[0], Fleet)
    assert (findings[0].hosts, findings[0].ranks, check.outcome) == (("b",), (1,), Outcome.FAILED)


# What a report says of the job's state: one that is made while the launcher lives claims no end.


def judgment(*findings: tuple[str, str, Severity]) -> Judgment:
    made = [
        Finding(code=code, kind=kind, severity=severity, confidence=Confidence.HIGH, summary="s")
        for code, kind, severity in findings
    ]
    return Judgment(findings=tuple(made), checks=(), certain=False)


HANG = judgment(("DD601", "stuck", Severity.ERROR))
NAN = judgment(("DD504", "nonfinite-grad", Severity.ERROR))
AT_EXIT = judgment(("DD612", "exit-abort", Severity.INFO))


@pytest.mark.parametrize(
    ("life", "ended", "launcher_status", "judged", "status"),
    [
        (Life.RUNNING, False, None, HANG, JobStatus.RUNNING),
        (Life.RUNNING, False, None, NAN, JobStatus.RUNNING),
        (Life.EXITED, False, None, HANG, JobStatus.RUNNING),  # its ranks ended while the evidence was taken
        (Life.EXITED, False, None, NAN, JobStatus.RUNNING),
        (Life.EXITED, True, 0, NAN, JobStatus.FINISHED),
        (Life.EXITED, True, 1, NAN, JobStatus.FAILED),
        (Life.EXITED, True, 1, AT_EXIT, JobStatus.FINISHED),
    ],
)
def test_the_status(
    life: Life,
    ended: bool,  # noqa: FBT001 - a column of the table
    launcher_status: int | None,
    judged: Judgment,
    status: JobStatus,
) -> None:
    seen = replace(job(replace(rank(0), life=life)), ended=ended, launcher_status=launcher_status)
    assert job_status(seen, judged, hung=False, interrupted=False) is status


# What rules say of variables is said of the options that were typed.


FOUND = Finding(
    code="DD206",
    kind="master-loopback",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    ranks=(),
    summary="PET_MASTER_ADDR is localhost on 2 nodes",
    evidence=("2 nodes: PET_NNODES is 2", "PET_MASTER_ADDRESS is something else"),
    fix="export PET_MASTER_ADDR=node0 on all nodes",
)


def test_options_have_their_own_names():
    (found,) = as_typed([FOUND], NodeOptions(nnodes="2", master_addr="localhost"))
    assert found.summary == "--master-addr is localhost on 2 nodes"
    assert found.evidence == ("2 nodes: --nnodes is 2", "PET_MASTER_ADDRESS is something else")
    assert found.fix == "--master-addr=node0 on all nodes"


def test_variables_that_an_operator_gave_keep_theirs():
    assert as_typed([FOUND], NodeOptions()) == (FOUND,)
    (found,) = as_typed([FOUND], NodeOptions(nnodes="2"))
    assert found.summary == FOUND.summary


# Pages of rules, found by code or kind.


STUCK = RulePage(
    code="DD601", kind="stuck", severity="error", summary="A rank is stuck.", text="A rank waits.\n\n# Why\n"
)
EXIT = RulePage(code="DD609", kind="exit-hang", severity="error", summary="It does not end.", text="Threads [/x].")
NOTE = RulePage(code="DD901", kind="not-recorded", severity="info", summary="No ring.", text="Full disk.")
PAGES = (STUCK, EXIT, NOTE)


@pytest.mark.parametrize("name", ["DD601", "dd601", "stuck", "Stuck"])
def test_a_page_is_found_in_any_case(name):
    assert find_page(name, PAGES) is STUCK


@pytest.mark.parametrize(
    ("name", "offer"), [("DD60", "DD601 (stuck)"), ("exithang", "DD609 (exit-hang)"), ("stack", "DD601")]
)
def test_an_unknown_name_offers_what_is_near(name, offer):
    with pytest.raises(UserError, match=f"no rule {name}") as error:
        find_page(name, PAGES)
    assert offer in error.value.help


def test_a_name_like_none_offers_nothing_but_the_list():
    with pytest.raises(UserError) as error:
        find_page("qqqqqqq", PAGES)
    assert error.value.help.startswith("`ddpdoctor explain --list`")


def test_codes_to_ignore_may_come_in_one_word_and_in_any_case():
    assert check_codes(("dd601, DD901", "DD609", "")) == ("DD601", "DD901", "DD609")


@pytest.mark.parametrize("code", ["DD999", "stuck"])
def test_only_codes_can_be_ignored(code):
    with pytest.raises(UserError, match=code.upper()):
        check_codes((code,))


def test_the_list_is_a_table():
    assert render_list(PAGES).splitlines() == [
        "DD601  stuck         error    A rank is stuck.",
        "DD609  exit-hang     error    It does not end.",
        "DD901  not-recorded  info     No ring.",
    ]


def test_a_page_is_printed_as_it_is():
    assert render_page(EXIT) == "DD609 exit-hang (error)\n=======================\n\nThreads [/x].\n"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("gpu-node7 differs", "host-1 differs"),
        ("gpu-node7.example.org and gpu-node7", "host-2 and host-1"),
        ("gpu-node71 is another", "gpu-node71 is another"),
        ("MASTER_ADDR=10.1.2.3, then 10.1.2.3 and 10.1.2.4", "MASTER_ADDR=address-1, then address-1 and address-2"),
        ("eth0 10.1.2.3/24 fe80::fc:ff:fe00:1", "eth0 address-1/24 address-2"),
        ("02:fc:00:00:00:01", "address-1"),
        ("127.0.0.1 and ::1 and 0.0.0.0", "127.0.0.1 and ::1 and 0.0.0.0"),
        ("/home/jane/train.py of jane", "/home/user-1/train.py of user-1"),
        ("/home/other/train.py", "/home/user/train.py"),
        ("torch 2.13.0, driver 580.65.06, at 12:30:05", "torch 2.13.0, driver 580.65.06, at 12:30:05"),
        ("GPU 0000:1b:00.0", "GPU 0000:1b:00.0"),
    ],
)
def test_names_and_addresses_become_words(text, hidden):
    assert Redactor(["gpu-node7", "gpu-node7.example.org", "localhost", "10.1.2.3"], ["jane"]).text(text) == hidden


def test_a_whole_report_is_hidden():
    own = Lookup(name="n1", addresses=(), error=None, timed_out=False, duration_s=0)
    names = Names(hostname="n1", fqdn="n1.cluster", own=own, master=None, head=None, reverse_s=None)
    facts = fleet(
        node("n1", processes=[process(0, SLURM_JOB_NODELIST="n[1-2]", MASTER_ADDR="boss.cluster")], names=names)
    )
    finding = Finding(
        code="DD201", kind="hostname-loopback", severity=Severity.ERROR, confidence=Confidence.HIGH, hosts=("n1",),
        summary="n1.cluster is 127.0.1.1", evidence=("n[1-2]", "boss.cluster is 10.0.0.9"), fix="edit /etc/hosts of n2",
    )  # fmt: skip
    report = Report(
        command=("ddpdoctor", "check-env", "--master-addr", "n2"), started_at="t", ended_at="t", job=None,
        verdict=finding, findings=(finding,), ranks=(), data={"hosts": ["n1"]},
        checks=(Check(id="hostname-loopback", outcome=Outcome.FAILED, hosts=("n1",), seen="n1"),),
    )  # fmt: skip

    hidden = redact(report, facts, {"USER": "jane"})

    for name in ("n1", "n2", "boss", "cluster", "10.0.0.9", "n[1-2]"):
        assert name not in str(hidden)
    assert hidden.verdict == hidden.findings[0]
    assert hidden.data["hosts"] == list(hidden.findings[0].hosts)


def test_the_hosts_of_ranks_that_did_not_answer_are_hidden_too():
    report = Report(
        command=(), started_at="t", ended_at="t", job=None, verdict=None, findings=(), ranks=(), checks=(),
        data={"gathering": ["rank 1 (silent7, process 77) started and did not answer within 30 s"]},
    )  # fmt: skip
    hidden = redact(report, replace(fleet(node("n1")), silent_hosts=("silent7",)), {})

    assert "silent7" not in str(hidden)
    assert "process 77" in str(hidden)


# Waits folded by class: a circle stays a circle, and many classes become few.


def row(number, state="in all_reduce", line=20):
    place = Place(rank=number, file="/home/me/train.py", line=line, function="main")
    return RankRow(rank=number, local_rank=None, host="h", pid=None, state=state, where=place)


def test_ranks_that_wait_for_the_same_at_one_line_are_one_class():
    rows = {n: row(n) for n in range(4)} | {1: row(1, "in the script", 9)}
    found = fold_waits({n: frozenset({1}) for n in (0, 2, 3)}, rows, frozenset({1}))
    assert [(one.ranks, one.state, one.place, one.blamed) for one in found.classes] == [
        ((0, 2, 3), "in all_reduce", "/home/me/train.py:20 in main", False),
        ((1,), "in the script", "/home/me/train.py:9 in main", True),
    ]
    assert found.links == ((0, 1),)


def test_a_circle_at_one_line_is_not_folded():
    found = fold_waits({0: frozenset({1}), 1: frozenset({0})}, {0: row(0), 1: row(1)}, frozenset({0, 1}))
    assert [one.ranks for one in found.classes] == [(0,), (1,)]
    assert found.links == ((0, 1), (1, 0))


def test_a_large_circle_becomes_a_class_that_waits_for_itself():
    world = MOST_CLASSES + 1
    found = fold_waits(
        {n: frozenset({(n + 1) % world}) for n in range(world)}, {n: row(n) for n in range(world)}, frozenset()
    )
    assert [one.ranks for one in found.classes] == [tuple(range(world))]
    assert found.links == ((0, 0),)


def test_ranks_that_nobody_has_seen_never_started():
    found = fold_waits({0: frozenset({1, 2})}, {0: row(0)}, frozenset({1, 2}))
    assert (found.classes[1].ranks, found.classes[1].state, found.classes[1].place) == ((1, 2), "never started", "")
    assert fold_waits({}, {0: row(0)}, frozenset()) is None


# Launches that try settings: their order, what they take, and what is left of them if they end early.


PLAN = RestartPlan(settings=("workers=2", "threads=1"), why="the ranks wait", launch_s=10.0)
BLOCKS = [
    TriedBlock(round=number, setting=setting, ranks_ms=((1.0,),))
    for number in range(4)
    for setting in (BASE, AGAIN, "workers=2")
]


def test_each_round_has_the_scripts_settings_twice_and_each_other_one_once():
    order = order_launches(PLAN, 4)
    assert order == order_launches(PLAN, 4)
    for number in range(4):
        assert sorted(setting for one, setting in order if one == number) == sorted((BASE, AGAIN, *PLAN.settings))


def test_it_is_said_beforehand_how_many_launches_there_are_and_how_long_they_take():
    assert describe_plan(PLAN, 4) == (
        "the ranks wait. Tried by restarts: num_workers=2, OMP_NUM_THREADS=1, in 4 rounds: 16 launches, about 3 min "
        "in all"
    )


def test_a_setting_that_failed_leaves_the_others_their_results():
    record = restarts_record(PLAN, 4, BLOCKS, {"threads=1": "the job hung with it"}, "")
    assert record.has_result
    assert record.by_restarts
    assert record.refused == (("threads=1", "the job hung with it"),)


def test_launches_that_were_stopped_have_no_result():
    record = restarts_record(PLAN, 4, BLOCKS, {"threads=1": "the job hung with it"}, "interrupted")
    assert not record.has_result
    assert record.refused == (("workers=2", "interrupted"), ("threads=1", "the job hung with it"))


@pytest.mark.parametrize(("setting", "found"), [("workers=2", True), ("base", False)])
def test_a_launch_is_a_block_of_its_round(setting, found, tmp_path):
    (tmp_path / "tuning").mkdir()
    line = {"round": 0, "setting": "workers=2", "steps_ns": [2_000_000]}
    (tmp_path / "tuning" / "0.jsonl").write_text(json.dumps(line) + "\n")
    block = TriedBlock(round=3, setting="workers=2", ranks_ms=((2.0,),))
    assert read_launch(tmp_path, setting, 3) == (block if found else None)


# One row a rank: what it did until a job that hung was stopped, not what it raised then.


FAILED_LATER = replace(in_backward(0), raised=(error("RuntimeError", at=NOW + S),))

RECEIVE = call("irecv", index=98, peer=1, is_async=True)
WAITS = call_rank(0, open_calls=(RECEIVE, phase("work_wait", 22, index=99, awaits=98)))


@pytest.mark.parametrize(
    ("seen", "stopped_ns", "state"),
    [
        (FAILED_LATER, NOW, "in backward"),
        (FAILED_LATER, None, "raised RuntimeError"),
        (FAILED_LATER, NOW + 2 * S, "raised RuntimeError"),
        (crashed(0, error(at=NOW + S)), NOW, "raised ValueError"),
        (crashed(0, error("RuntimeError", in_call="work_wait")), None, "raised RuntimeError in a wait"),
        (WAITS, None, "in irecv"),
    ],
)
def test_state(seen, stopped_ns, state):
    assert rank_row(seen, stopped_ns).state == state
