from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.node import Fleet
from ddpdoctor.model.reading import NotRead, Unread, Why
from ddpdoctor.rules import engine
from ddpdoctor.rules.answers import Problem, judged, passed, skipped
from ddpdoctor.rules.registry import CheckGroup, Rule
from tests.rules.environment.build import fleet, node


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
