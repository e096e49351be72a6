"""Actions on verdicts that are made up: which hosts are excluded, what a command and a webhook get."""

from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.cli.actions import call_webhook, exclude_hosts, hosts_to_exclude, run_command, status_of_verdict
from ddpdoctor.collect.process.proc import read_process
from ddpdoctor.model.findings import Confidence, FaultOrigin, Finding, RankRow, Report, Severity
from tests.scenarios.running import wait_for
from tests.web import Receiver

FINDING = Finding(
    code="DD611", kind="transport", severity=Severity.ERROR, confidence=Confidence.HIGH,
    summary="an all_reduce\nstalls", ranks=(1,), hosts=("node1",), origin=FaultOrigin.NETWORK,
    fix="look at the network",
)  # fmt: skip


def report(**changes):
    finding = replace(FINDING, **changes)
    rows = tuple(RankRow(rank=n, local_rank=0, host=f"node{n}", pid=None, state="in all_reduce") for n in range(3))
    return Report(
        command=("wrap",), started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z", job=None,
        verdict=finding, findings=(finding,), checks=(), ranks=rows, tool_version="1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "hosts"),
    [
        ({}, ("node1",)),
        ({"origin": FaultOrigin.MACHINE}, ("node1",)),
        ({"hosts": (), "ranks": (2,)}, ("node2",)),
        ({"hosts": ("node0", "node1", "node2")}, ()),
        ({"origin": FaultOrigin.SCRIPT}, ()),
        ({"origin": FaultOrigin.SETTINGS}, ()),
        ({"origin": None}, ()),
    ],
)
def test_only_hosts_with_a_fault_of_theirs_are_excluded(changes, hosts) -> None:
    assert hosts_to_exclude(report(**changes)) == hosts


def test_a_host_is_excluded_once_with_reason_and_time(tmp_path: Path) -> None:
    path = tmp_path / "excluded"
    path.write_text("node7\n")
    assert exclude_hosts(path, report(), Path("report.json")) == f"node1 excluded in {path}"
    assert exclude_hosts(path, report(), Path("report.json")) == ""
    assert path.read_text().splitlines() == [
        "node7", "# 2026-01-02T03:04:06Z DD611 transport: an all_reduce stalls (report.json)", "node1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("origin", "severity", "status", "wanted"),
    [
        (FaultOrigin.NETWORK, Severity.ERROR, 124, 75),
        (FaultOrigin.SCRIPT, Severity.ERROR, 1, 70),
        (FaultOrigin.SETTINGS, Severity.ERROR, 1, 70),
        (None, Severity.ERROR, 124, 124),
        (FaultOrigin.SCRIPT, Severity.WARNING, 1, 1),
        (FaultOrigin.SCRIPT, Severity.ERROR, 0, 0),
    ],
)
def test_the_status_says_whether_to_start_again(origin, severity, status, wanted) -> None:
    assert status_of_verdict(report(origin=origin, severity=severity), status) == wanted


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/child; wait"
    said = run_command(script, report(), FINDING, Path("report.json"), limit_s=2.0)
    assert said == "--on-finding: the command was killed after 2 s"
    child = int((tmp_path / "child").read_text())
    assert wait_for(lambda: (found := read_process(child)) is None or found.state in "ZX")


@pytest.mark.parametrize("form", ["json", "slack", "teams"])
def test_each_form_says_the_verdict(form) -> None:
    with Receiver() as receiver:
        assert call_webhook(receiver.url, form, report(), Path("report.json")) == ""
    (sent,) = receiver.received
    assert sent.keys() == {
        "json": {"text", "report", "started_at", "ended_at", "job", "verdict"}, "slack": {"text"},
        "teams": {"type", "attachments"},
    }[form]  # fmt: skip
    assert "stalls" in str(sent)
    assert "look at the network" in str(sent)


@pytest.mark.parametrize(("answer", "tries"), [(500, 3), (429, 3), (404, 1)])
def test_a_server_that_may_recover_is_asked_again(answer, tries) -> None:
    with Receiver(answers=(answer,)) as receiver:
        said = call_webhook(receiver.url, "json", report(), Path("report.json"), pause=lambda _: None)
    assert len(receiver.received) == tries
    assert f"it answered {answer}" in said
    assert "/hook" not in said
