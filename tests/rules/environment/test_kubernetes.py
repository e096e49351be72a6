"""DD239: healthy, each failing form, missing facts, near misses."""

import pytest

from ddpdoctor.collect.network.interfaces import read_network
from ddpdoctor.collect.network.names import read_names
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.reading import Unread, Why
from tests.machines import load_machine
from tests.rules.environment.build import ask, node, process
from tests.rules.environment.launches import recorded


def pod(folder, *states, env=None):
    system = load_machine("k8s-pod", folder, *states, env=env)
    plan = ReadingPlan(sections=frozenset())
    processes = [recorded("k8s-pod", folder, *states, env=env)]
    return node(processes=processes, names=read_names(system, plan), network=read_network(system, plan))


def test_no_pod():
    check, findings = ask("k8s", node(processes=[process(None, PET_NNODES="2", GROUP_WORLD_SIZE="1")]))
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())


@pytest.mark.parametrize("states", [(), ("torchrun",), ("pytorchjob",), ("elastic",)])
def test_pods_as_they_should_be(tmp_path, states):
    check, findings = ask("k8s", pod(tmp_path, *states))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_a_pod_of_which_nothing_else_is_known():
    dead = Unread(why=Why.TIMEOUT, reason="no answer")
    facts = node(processes=[process(None, KUBERNETES_SERVICE_HOST="10.96.0.1")], names=dead, network=dead)
    check, findings = ask("k8s", facts)
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "a pod without an operator's variables"


@pytest.mark.parametrize(
    ("states", "summary", "fix"),
    [
        (("unpublished",), "the master's name llama-node-0-0.llama does not resolve in this pod",
         """kubectl patch service llama -p '{"spec":{"publishNotReadyAddresses":true}}'"""),
        (("istio",), "Istio's proxy intercepts all connections of this pod", 'sidecar.istio.io/inject: "false"'),
        (("host-network",), "the pod uses the host's network and /etc/hosts", "GLOO_SOCKET_IFNAME=eth0"),
    ],
)  # fmt: skip
def test_broken_pods(tmp_path, states, summary, fix):
    check, (finding,) = ask("k8s", pod(tmp_path, *states))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.WARNING)
    assert summary in finding.summary
    assert fix in finding.fix


def test_a_command_line_that_overrules_the_operator(tmp_path):
    _, findings = ask("k8s", pod(tmp_path, "torchrun", "standalone"))
    assert [finding.summary for finding in findings] == [
        "the operator set PET_NNODES=2, but torchrun counts 1: each pod trains alone",
        "the operator set PET_NPROC_PER_NODE=8, but torchrun started 4 on this pod",
    ]
    assert findings[0].fix.startswith("remove --nnodes and --standalone")


@pytest.mark.parametrize(("nnodes", "found"), [("1:4", 0), ("2", 0), ("3:4", 1), ("auto", 0)])
def test_an_elastic_range(tmp_path, nnodes, found):
    _, findings = ask("k8s", pod(tmp_path, "torchrun", env={"PET_NNODES": nnodes}))
    assert len(findings) == found
