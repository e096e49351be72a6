"""`check-env` as a user meets it on the command line."""

import json
import os
import re
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from tests import forking
from tests.scenarios.running import SCHEMA

VERB = ("check-env",)


def test_this_machine_is_checked_without_an_error_of_ours(run):
    done = run("--format", "json", "--fail-on", "never", "--skip", "xid")
    report = json.loads(done.stdout)

    jsonschema.validate(report, SCHEMA)
    assert done.stderr == ""
    assert [check for check in report["checks"] if check["outcome"] == "crashed"] == []
    assert "xid" not in {check["id"] for check in report["checks"]}
    assert all(
        check["seen"] if check["outcome"] in {"passed", "failed"} else check["reason"] for check in report["checks"]
    )


def test_the_list_names_each_check_with_code_and_what_it_reads(run):
    from ddpdoctor.rules.registry import rules_of

    done = run("--list")
    lines = [line.split(None, 4) for line in done.stdout.splitlines()]

    assert done.returncode == 0
    assert [line[:2] for line in lines] == [[rule.code, rule.kind] for rule in rules_of("environment")]
    assert all(len(line) == 5 for line in lines)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("shm", "nofile"), {"DD121", "DD122"}),
        (("dd121",), {"DD121"}),
        (("DD12", "--skip", "DD121,nofile"), {"DD123", "DD124", "DD125", "DD126", "DD127", "DD128", "DD129"}),
        (("shm", "--skip", "xid"), {"DD121"}),
    ],
)
def test_checks_are_chosen_by_kind_code_and_beginning(run, names, expected):
    done = run("--list", *names)

    assert {line.split()[0] for line in done.stdout.splitlines()} == expected


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (("shn",), "there is no check shn", "Did you mean shm"),
        (("--skip", "DD999"), "there is no check DD999", "--list"),
        (("shm", "--skip", "DD1"), "no check is left", "--list"),
        (("--timeout", "soon"), "--timeout is 'soon'", "30"),
    ],
)
def test_wrong_use_is_reported_with_what_to_do(run, args, message, hint):
    done = run(*args)

    assert done.returncode == 2
    assert message in done.stderr
    assert hint.split("30")[0] in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_exit_status_follows_fail_on(run):
    env = {"NCCL_IB_TIMEOT": "20"}
    statuses = [
        run("env-unknown", *more, **env).returncode for more in ((), ("--fail-on", "warning"), ("--fail-on", "never"))
    ]

    assert statuses == [0, 1, 0]


def test_a_problem_is_shown_with_its_remedy_and_a_quiet_machine_with_two_lines(run):
    bad = run("env-unknown", NCCL_IB_TIMEOT="20")
    good = run("env-unknown")

    assert "warning  DD111 env-unknown" in bad.stdout
    assert "NCCL_IB_TIMEOUT" in bad.stdout
    assert "  to do " in bad.stdout
    assert good.stdout == "ddpdoctor: no problem found\n  checks: 1 passed, 0 skipped (-v shows each)\n"


def test_junit_and_markdown_hold_the_finding(run):
    suite = ET.fromstring(
        run("env-unknown", "--format", "junit", "--fail-on", "warning", NCCL_IB_TIMEOT="1").stdout
    ).find("testsuite")

    assert suite.get("failures") == "1"
    assert "### warning: DD111 env-unknown" in run("env-unknown", "--format", "markdown", NCCL_IB_TIMEOT="1").stdout


def test_a_saved_report_is_drawn_again(run, tmp_path):
    shown = run("env-unknown", "--report-dir", tmp_path / "saved", NCCL_IB_TIMEOT="1")
    again = forking.run("-m", "ddpdoctor", "report", tmp_path / "saved", cwd=tmp_path)

    assert shown.stdout == again.stdout
    assert run("env-unknown", "--report-dir", tmp_path / "saved").returncode == 2


def test_values_of_unlisted_variables_never_reach_a_report(run):
    done = run("--format", "json", "--no-torch", NCCL_MY_TOKEN="hunter2", HF_TOKEN="hunter2", MY_PASSWORD="hunter2")

    assert "hunter2" not in done.stdout
    assert "NCCL_MY_TOKEN" in done.stdout


def test_redacted_output_names_neither_host_nor_address_nor_user(run):
    host = os.uname().nodename
    text = run("--no-torch", "-v", "--redact", "--fail-on", "never", USER="jane-doe", MASTER_ADDR="10.9.8.7").stdout

    assert not re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", text)
    assert "10.9.8.7" not in text
    assert "jane-doe" not in text
