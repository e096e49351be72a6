"""What a rank's process shows of the reason for which it stands still or died: sentences, and what to do."""

from __future__ import annotations

import re

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model import facts
from ddpdoctor.model.facts import HostCauses, ProcessCauses, Space
from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.node import KernelView, Xid
from ddpdoctor.model.stacks import Frame
from ddpdoctor.rules.engine import order_findings, pick_verdict
from ddpdoctor.rules.progress.job_state import JobState
from ddpdoctor.rules.registry import PAGES, all_rules, find_rule, rule
from tests.golden import table
from tests.rules import build
from tests.rules.build import NOW, call, crashed, error, in_call, in_user, job, line, sample, stack
from tests.rules.environment.build import node

GIB = 2**30


def lib(path, function="run"):
    return Frame(file=path, line=1, function=function, user=False)


def stuck(frames=(), threads=(), **causes):
    found = ProcessCauses(**causes)
    samples = (sample(stack(line(40), line(12, "load"), *frames), *threads),)
    return judge(job(in_call(0), in_user(1, samples=samples, causes=found), in_call(2)))


def leaves(op, answered, blocked):
    """A rank whose script has made its last call, and does not end."""
    seen = (sample(stack(line(40)), by="signal"),)
    last = (call(op, open_=False),)
    return in_user(1, recent_calls=last, answered=answered, causes=ProcessCauses(blocked=blocked), samples=seen)


def waits_for(number, since_ns, **causes):
    """A rank that has waited for a file so long before its group is made."""
    more = {"initialized": False, "groups": (), "causes": ProcessCauses(**causes), "last_progress_ns": NOW - since_ns}
    return in_user(number, line(12, "load"), lib("/usr/lib/python3/site-packages/filelock/_api.py", "acquire"), **more)


def polling(number, file, **more):
    return in_user(
        number,
        line(12, "load"),
        lib(f"{build.TORCH}/utils/file_baton.py", "wait"),
        initialized=False,
        groups=(),
        causes=ProcessCauses(lock_file=file),
        **more,
    )


def died(rank, *, group=None, machine=None, shared=None):
    causes = HostCauses(group=group, machine=machine, shared_memory=shared)
    return judge(job(rank, in_call(1), in_call(2), ended=True, host_causes=causes))


def of_driver(rank, code, text, age_s):
    """Judge a rank that died, where the kernel's log has such a fault of a GPU."""
    machine = node(
        "node0", kernel_log=KernelView(xids=(Xid(bus_id="0000:1b:00.0", code=code, text=text, age_s=age_s),))
    )
    return judge(job(rank, in_call(1), in_call(2), ended=True, machine=machine))


def space(limit, used):
    return Space(limit_bytes=int(limit * GIB), used_bytes=int(used * GIB))


def raised(kind, message, causes=None):
    frames = (line(40), line(7, "parse"))
    return crashed(0, error(kind, message, frames=frames), causes=causes)


# The verdict is the one finding to act on first.


RULES = {rule.kind: rule for rule in all_rules()}


def found(code, severity=Severity.ERROR, step=None, confidence=Confidence.HIGH):
    return Finding(code=code, kind=code, severity=severity, confidence=confidence, summary="", step=step)


WARNING, INFO = Severity.WARNING, Severity.INFO


def verdict(findings):
    verdict = pick_verdict(findings)
    assert pick_verdict(reversed(findings)) == verdict
    return verdict and verdict.code


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


# Codes and kinds are used once, and every rule has a page.


def page_less(job: JobState):
    return job


def with_page(job: JobState):
    """A page."""
    return job


def about_nothing(thing: Thing):  # noqa: F821 - the name of no facts that there are
    """A page."""
    return thing


PAGE = re.compile(
    r"What to do, What it means, How it is recognized(, How sure)?(, What else looks like it)?(, Example)?"
)


def test_rules_are_sorted_each_has_a_page_of_one_form_and_is_found_by_code_and_kind():
    codes = [found.code for found in all_rules()]
    assert codes == sorted(codes)
    assert {path.stem for path in PAGES.iterdir()} == set(codes)
    for found in all_rules():
        assert PAGE.fullmatch(", ".join(re.findall("^## (.*)$", found.page, re.MULTILINE))), found.code
        assert found.page.startswith(("Report ", "Compare ", "Say ", "Note ")), found.page.splitlines()[0]
        for name in (found.code, found.code.lower(), found.kind, f" {found.kind} "):
            assert find_rule(name) == found
    assert find_rule("DD999") is None


@pytest.mark.parametrize(
    ("code", "kind", "check", "said"),
    [
        ("DD601", "new", with_page, "taken"), ("DD699", "stuck", with_page, "taken"),
        ("DD699", "new", page_less, "docstring"), ("DD699", "new", about_nothing, "judges a Thing"),
    ],
)  # fmt: skip
def test_a_rule_is_refused_that_has_no_page_asks_about_nothing_or_takes_a_name_again(code, kind, check, said):
    all_rules()
    with pytest.raises(ValueError, match=said):
        rule(code, kind, Severity.ERROR, "again")(check)


test_rows = table("causes", vars(facts), vars(build), globals(), head=build.sureness)
