"""The debug level, and what --quiet leaves."""

from __future__ import annotations

import pytest

from ddpdoctor.cli.debug_level import choose_debug_level
from ddpdoctor.cli.running import keep_errors
from ddpdoctor.cli.wrapping import parse_check_every
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, Finding, Report, Severity


@pytest.mark.parametrize(
    ("asked", "env", "level"),
    [
        (None, {}, "DETAIL"),
        (None, {"TORCH_DISTRIBUTED_DEBUG": ""}, "DETAIL"),
        (None, {"TORCH_DISTRIBUTED_DEBUG": "OFF"}, None),
        ("INFO", {"TORCH_DISTRIBUTED_DEBUG": "OFF"}, "INFO"),
        ("OFF", {}, "OFF"),
    ],
)
def test_the_debug_level_is_detail_unless_somebody_said_otherwise(asked, env, level):
    assert choose_debug_level(asked, env) == level


@pytest.mark.parametrize(("asked", "level"), [(None, None), ("DETAIL", "DETAIL")])
def test_without_room_detail_is_for_who_asks_for_it(asked, level):
    assert choose_debug_level(asked, {}, has_room=False) == level


def make_report(*severities, verdict=None):
    findings = tuple(
        Finding(code=f"DD60{n}", kind="stuck", severity=severity, confidence=Confidence.HIGH, summary="s")
        for n, severity in enumerate(severities)
    )
    return Report(
        command=(),
        started_at="",
        ended_at="",
        job=None,
        verdict=None if verdict is None else findings[verdict],
        findings=findings,
        checks=(),
        ranks=(),
    )


def test_quiet_leaves_errors_only():
    left = keep_errors(make_report(Severity.ERROR, Severity.WARNING, Severity.INFO, verdict=0))
    assert [finding.severity for finding in left.findings] == [Severity.ERROR]
    assert left.verdict == left.findings[0]


def test_quiet_leaves_nothing_of_warnings():
    assert keep_errors(make_report(Severity.WARNING, Severity.INFO, verdict=0)) is None


@pytest.mark.parametrize(("text", "steps"), [("1", 1), ("50", 50), (" 200 ", 200), ("999999999", 999_999_999)])
def test_every_how_many_steps_replicas_are_compared(text, steps):
    assert parse_check_every(text) == steps


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "ten", "", "5s", "1e3", "²", "9" * 10, "9" * 5000])
def test_what_is_no_number_of_steps_is_wrong_use(text):
    with pytest.raises(UserError, match="--check-every") as raised:
        parse_check_every(text)
    assert "--no-consistency" in raised.value.help
