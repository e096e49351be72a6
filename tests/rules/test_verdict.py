"""The verdict is the one finding to act on first."""

import pytest

from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.rules.registry import all_rules
from ddpdoctor.rules.verdict import order_findings, pick_verdict

RULES = {rule.kind: rule for rule in all_rules()}


def found(code, severity=Severity.ERROR, step=None, confidence=Confidence.HIGH):
    return Finding(code=code, kind=code, severity=severity, confidence=confidence, summary="", step=step)


WARNING, INFO = Severity.WARNING, Severity.INFO
TABLE = {
    "nothing": ([], None),
    "an info is none": ([found("DD612", INFO)], None),
    "a warning before an info": ([found("DD612", INFO), found("DD610", WARNING)], "DD610"),
    "an error before a warning": ([found("DD502", WARNING, 0), found("DD501", step=9)], "DD501"),
    "the root of a hang before earlier steps": ([found("DD501", step=1), found("DD601", step=9)], "DD601"),
    "the earliest step first": ([found("DD504", step=5), found("DD501", step=2)], "DD501"),
    "within a step the number that spreads": ([found(c, step=2) for c in ("DD505", "DD501", "DD503")], "DD503"),
    "a non-finite gradient first": ([found("DD503", step=2), found("DD504", step=2)], "DD504"),
    "data before the other warnings": ([found("DD502", WARNING), found("DD702", WARNING)], "DD702"),
    "a name before the connections that fail by it": ([found("DD220"), found("DD219"), found("DD207")], "DD207"),
    "what keeps a job from starting before what spoils it": ([found("DD104"), found("DD129"), found("DD220")], "DD220"),
    "the node that is absent before a start that fails": ([found("DD221"), found("DD233")], "DD233"),
    "the surer one": ([found("DD608", confidence=Confidence.LOW), found("DD601")], "DD601"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_verdict(name):
    findings, code = TABLE[name]
    verdict = pick_verdict(findings)
    assert (verdict.code if verdict is not None else None) == code
    assert pick_verdict(reversed(findings)) == verdict


def test_order_keeps_all():
    findings = [found("DD612", INFO), found("DD601"), found("DD702", WARNING)]
    assert [f.code for f in order_findings(findings)] == ["DD601", "DD702", "DD612"]


def test_what_a_rule_comes_after_is_a_rule_and_no_circle():
    def depth(kind, seen=()):
        assert kind not in seen, seen
        return max((depth(before, (*seen, kind)) + 1 for before in RULES[kind].after), default=0)

    assert max(map(depth, RULES)) > 10


STARTING = (
    "DD205", "DD206", "DD208", "DD207", "DD204", "DD231", "DD232", "DD216", "DD219", "DD235", "DD234", "DD233", "DD202",
    "DD211", "DD212", "DD201", "DD203", "DD213", "DD220", "DD215", "DD221",
)  # fmt: skip
BENCH, NUMBERS = ("DD401", "DD402", "DD403", "DD404", "DD405"), ("DD504", "DD503", "DD501", "DD505", "DD701", "DD502")


@pytest.mark.parametrize("codes", [STARTING, BENCH, NUMBERS])
def test_the_order_that_rules_declare(codes):
    findings = [found(code) for code in reversed(codes)]
    assert tuple(finding.code for finding in order_findings(findings)) == codes
