from dataclasses import replace

import pytest

from ddpdoctor.diagnose.redact import Redactor, redact
from ddpdoctor.model.findings import Check, Confidence, Finding, Outcome, Report, Severity
from ddpdoctor.model.network import Lookup, Names
from tests.rules.environment.build import fleet, node, process


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
