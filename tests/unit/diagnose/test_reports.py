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
from ddpdoctor.model.facts import Life
from ddpdoctor.model.findings import Check, Judgment, Outcome, Place, RankRow, Severity
from ddpdoctor.model.launch import NodeOptions
from ddpdoctor.model.node import Lookup, Names
from ddpdoctor.model.reading import NotRead, Unread, Why
from ddpdoctor.model.saved import Checkpoints, Damage, FileSeen, Form, ReadState
from ddpdoctor.model.tuning import AGAIN, BASE, RestartPlan, TriedBlock
from ddpdoctor.rules import engine
from ddpdoctor.rules.answers import Problem, judged, passed, skipped
from ddpdoctor.rules.registry import CheckGroup, Rule
from tests.golden import Cases, words
from tests.pictures import finding, report
from tests.rules.build import NOW, S, call, crashed, error, in_backward, phase
from tests.rules.build import rank as call_rank
from tests.rules.environment.build import fleet, node, process
from tests.rules.speed.jobs import job, rank

CASES = Cases(__name__)

# What a report says of checkpoint files that were read.


def test_a_file_with_a_wrong_checksum_is_not_called_whole():
    damage = (Damage(record="data/0"),)
    files = [
        FileSeen(path="a.pt", size_bytes=9, form=Form.ZIP, state=state, damaged=damaged)
        for state, damaged in ((ReadState.WHOLE, ()), (ReadState.WHOLE, damage), (ReadState.CUT, damage))
    ]
    report = checkpoint_report(Checkpoints(files=tuple(files)), ("ddpdoctor",), "2026-01-01T00:00:00Z")
    assert [one["state"] for one in report.data["files"]] == ["whole", "damaged", "cut off"]


def rule(check, *, about="Node"):
    return Rule(
        code="DD199", kind="made-up", severity=Severity.WARNING, summary="made up", begins="page",
        checks={about: check}, family="environment", group=CheckGroup.LIMITS.value,
    )  # fmt: skip


def on_b(bad, else_):
    """A check that answers so on host b, and otherwise like this."""
    return lambda one: bad if one.host == "b" else else_


def broken(_):
    raise ValueError("boom")


def not_read(why):
    def check_one(_):
        raise NotRead(Unread(why=why, reason="no such thing"))

    return check_one


TWO_NODES, THREE_NODES = fleet(node("a"), node("b")), fleet(node("a"), node("b"), node("c"))
SMALL = Problem(summary="too small", fix="grow")


def answer_of(row):
    facts, check = eval(row, globals() | {"skipped": skipped, "Why": Why})
    return engine.judge([rule(check)], engine.fleet_facts(facts))


@CASES
def answers_of_rules():
    """A rule over all nodes is asked once and blames whom it names; one that raises leaves the others."""
    steps = rule(lambda job: judged([replace(SMALL, step=step) for step in job], "2 steps"), about="tuple")
    both = rule(lambda facts: judged([Problem(summary=f"{len(facts.nodes)} differ", hosts=("b",), ranks=(1,))], "two"),
                about="Fleet")  # fmt: skip
    return {
        "equal problems at two steps of a job": engine.judge([steps], {tuple: [(3, 7)]}),
        "one raises": engine.judge([rule(broken), rule(lambda _: passed("well"))], engine.fleet_facts(fleet(node()))),
        "over all nodes": engine.judge([both], engine.fleet_facts(TWO_NODES)),
    }


# What a report says of the job's state: one that is made while the launcher lives claims no end.


def judgment(code, kind, severity):
    return Judgment(findings=(finding(code, kind, severity),), checks=(), certain=False)


HANG = judgment("DD601", "stuck", Severity.ERROR)
NAN = judgment("DD504", "nonfinite-grad", Severity.ERROR)
AT_EXIT = judgment("DD612", "exit-abort", Severity.INFO)


def status_of(row):
    life, ended, launcher_status, judged = row.split()
    launched = {
        "ended": ended == "ended",
        "launcher_status": None if launcher_status == "none" else int(launcher_status),
    }
    seen = replace(job(replace(rank(0), life=Life[life])), **launched)
    return job_status(seen, {"HANG": HANG, "NAN": NAN, "AT_EXIT": AT_EXIT}[judged], hung=False, interrupted=False).value


# What rules say of variables is said of the options that were typed.


FOUND = replace(
    finding("DD206", "master-loopback"), summary="PET_MASTER_ADDR is localhost on 2 nodes",
    evidence=("2 nodes: PET_NNODES is 2", "PET_MASTER_ADDRESS is something else"),
    fix="export PET_MASTER_ADDR=node0 on all nodes",
)  # fmt: skip


# Pages of rules, found by code or kind.


STUCK = RulePage(
    code="DD601", kind="stuck", severity="error", summary="A rank is stuck.", text="A rank waits.\n\n# Why\n"
)
EXIT = RulePage(code="DD609", kind="exit-hang", severity="error", summary="It does not end.", text="Threads [/x].")
NOTE = RulePage(code="DD901", kind="not-recorded", severity="info", summary="No ring.", text="Full disk.")
PAGES = (STUCK, EXIT, NOTE)


def test_the_list_is_a_table_and_a_page_is_printed_as_it_is():
    assert render_list(PAGES).splitlines() == [
        "DD601  stuck         error    A rank is stuck.",
        "DD609  exit-hang     error    It does not end.",
        "DD901  not-recorded  info     No ring.",
    ]
    assert render_page(EXIT) == "DD609 exit-hang (error)\n=======================\n\nThreads [/x].\n"


def test_a_whole_report_is_hidden_also_the_hosts_of_ranks_that_did_not_answer():
    own = Lookup(name="n1", addresses=(), error=None, timed_out=False, duration_s=0)
    names = Names(hostname="n1", fqdn="n1.cluster", own=own, master=None, head=None, reverse_s=None)
    facts = fleet(
        node("n1", processes=[process(0, SLURM_JOB_NODELIST="n[1-2]", MASTER_ADDR="boss.cluster")], names=names)
    )
    found = replace(
        finding("DD201", "hostname-loopback", hosts=("n1",)), summary="n1.cluster is 127.0.1.1",
        evidence=("n[1-2]", "boss.cluster is 10.0.0.9"), fix="edit /etc/hosts of n2",
    )  # fmt: skip
    check = Check(id="hostname-loopback", outcome=Outcome.FAILED, hosts=("n1",), seen="n1")
    gathering = ["rank 1 (silent7, process 77) started but did not answer within 30 s"]
    seen = replace(
        report(found, checks=(check,), hosts=["n1"], gathering=gathering),
        command=("ddpdoctor", "check-env", "--master-addr", "n2"),
    )
    hidden = redact(seen, replace(facts, silent_hosts=("silent7",)), {"USER": "jane"})

    for name in ("n1", "n2", "boss", "cluster", "10.0.0.9", "n[1-2]", "silent7"):
        assert name not in str(hidden)
    assert "process 77" in str(hidden)
    assert hidden.verdict == hidden.findings[0]
    assert hidden.data["hosts"] == list(hidden.findings[0].hosts)


# Waits folded by class: a circle stays a circle, and many classes become few.


def row(number, state="in all_reduce", line=20):
    place = Place(rank=number, file="/home/me/train.py", line=line, function="main")
    return RankRow(rank=number, local_rank=None, host="h", pid=None, state=state, where=place)


WORLD = MOST_CLASSES + 1


def folded(text):
    """Fold waits; a circle at one line is not folded, unless it is large; ranks that nobody has seen never started."""
    waits, rows, blamed = eval(text)
    return fold_waits({rank: frozenset(those) for rank, those in waits.items()}, rows, frozenset(blamed))


test_kept = CASES.test()


# Launches that try settings: their order, what they take, and what is left of them if they end early.


PLAN = RestartPlan(settings=("workers=2", "threads=1"), why="the ranks wait", launch_s=10.0)
BLOCKS = [
    TriedBlock(round=number, setting=setting, ranks_ms=((1.0,),))
    for number in range(4)
    for setting in (BASE, AGAIN, "workers=2")
]


def test_each_round_has_the_scripts_settings_twice_and_each_other_one_once_and_all_is_said_beforehand():
    order = order_launches(PLAN, 4)
    assert order == order_launches(PLAN, 4)
    for number in range(4):
        assert sorted(setting for one, setting in order if one == number) == sorted((BASE, AGAIN, *PLAN.settings))
    assert describe_plan(PLAN, 4) == (
        "the ranks wait. Tried by restarts: num_workers=2, OMP_NUM_THREADS=1, in 4 rounds: 16 launches, about 3 min "
        "in total"
    )


@pytest.mark.parametrize("stopped", ["", "interrupted"])
def test_a_setting_that_failed_leaves_the_others_their_results_and_launches_that_were_stopped_have_none(stopped):
    failed = ("threads=1", "the job hung with it")
    record = restarts_record(PLAN, 4, BLOCKS, dict([failed]), stopped)
    assert record.by_restarts
    assert record.has_result is not bool(stopped)
    assert record.refused == ((("workers=2", "interrupted"), failed) if stopped else (failed,))


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


def state_of(row):
    return rank_row(*eval(row, globals() | {"crashed": crashed})).state


test_words = words(
    __name__,
    hide=lambda text: Redactor(["gpu-node7", "gpu-node7.example.org", "localhost", "10.1.2.3"], ["jane"]).text(text),
    check_codes=lambda codes: check_codes(codes.split(" | ")),
    find_page=lambda name: find_page(name, PAGES).code,
    status=status_of, fold_waits=folded, state=state_of,
    answer=answer_of, as_typed=lambda given: as_typed([FOUND], eval(given, {"NodeOptions": NodeOptions})),
)  # fmt: skip
