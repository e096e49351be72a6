"""Codes and kinds are used once, and every rule has a page."""

from __future__ import annotations

import re

import pytest

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.progress.job_state import JobState
from ddpdoctor.rules.registry import PAGES, all_rules, find_rule, rule

CODES = {
    "DD601": "stuck", "DD602": "mismatch", "DD603": "early-exit", "DD604": "crash", "DD605": "killed",
    "DD606": "stopped", "DD607": "missing", "DD608": "deadlock", "DD609": "exit-hang", "DD611": "transport",
    "DD612": "exit-abort", "DD901": "not-recorded",
}  # fmt: skip


def page_less(job: JobState):
    return job


def with_page(job: JobState):
    """A page."""
    return job


def about_nothing(thing: Thing):  # noqa: F821 - the name of no facts that there are
    """A page."""
    return thing


def test_all_rules_are_there_and_sorted():
    known = {r.code: r.kind for r in all_rules()}
    assert {code: known.get(code) for code in CODES} == CODES
    assert list(known) == sorted(known)


PAGE = re.compile(
    r"What it means, How it is recognized(, How sure)?(, What else looks like it)?, What to do(, Example)?"
)


@pytest.mark.parametrize("found", all_rules(), ids=lambda found: found.code)
def test_pages_have_one_form(found):
    assert PAGE.fullmatch(", ".join(re.findall("^## (.*)$", found.page, re.MULTILINE)))
    assert found.page.startswith(("Report ", "Compare ", "Say ", "Note ")), found.page.splitlines()[0]


def test_each_page_is_that_of_a_rule():
    assert {path.stem for path in PAGES.iterdir()} == {found.code for found in all_rules()}


@pytest.mark.parametrize("name", ["DD601", "dd601", "stuck", " stuck "])
def test_a_rule_is_found_by_code_and_kind(name):
    assert find_rule(name).code == "DD601"


def test_an_unknown_rule_is_none():
    assert find_rule("DD999") is None


@pytest.mark.parametrize(("code", "kind"), [("DD601", "new"), ("DD699", "stuck")])
def test_reuse_is_refused(code, kind):
    all_rules()
    with pytest.raises(ValueError, match="taken"):
        rule(code, kind, Severity.ERROR, "again")(with_page)


def test_a_rule_without_a_page_is_refused():
    with pytest.raises(ValueError, match="docstring"):
        rule("DD699", "new", Severity.ERROR, "no page")(page_less)


def test_a_rule_about_facts_that_no_verb_has_is_refused():
    with pytest.raises(ValueError, match="asked about a Thing"):
        rule("DD699", "new", Severity.ERROR, "no such facts")(about_nothing)
