"""DD208: healthy, each failing form, missing facts, near misses."""

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.node import Launcher
from tests.rules.environment.build import ask, fleet, node, process
from tests.rules.environment.launches import interface, lookup, names, network, torchrun_fleet

C10D = {"PET_RDZV_BACKEND": "c10d"}


def step(host, sections, *, missing=(), extra=(), **variables):
    """Return a step of one task a node, before torchrun has started; ``sections`` are names and network of each."""
    return fleet(
        *(
            node(
                own.hostname, index=index, names=own, network=cards,
                processes=[process(index, **({"MASTER_ADDR": host} | variables))],
            )
            for index, (own, cards) in enumerate(sections)
        ),
        *extra,
        launcher=Launcher.SLURM, world_size=len(sections), nnodes=len(sections), missing=missing,
    )  # fmt: skip


def hosts(host, *addresses, own=("10.0.0.1", "10.0.0.2"), cards=()):
    """Return two hosts on which an endpoint's host is looked up to addresses."""
    return [
        (names(f"node{index}", address, master=lookup(host, *addresses)), network(*cards[index : index + 1]))
        for index, address in enumerate(own)
    ]


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (fleet(node()), Outcome.SKIPPED),
        (torchrun_fleet(), Outcome.SKIPPED),
        (step("node0", hosts("node0", "10.0.0.1")[:1]), Outcome.SKIPPED),
        (step("node0", hosts("node0"), RANK="0"), Outcome.SKIPPED),
        (step("node0", hosts("node0"), PET_RDZV_CONF="is_host=1"), Outcome.SKIPPED),
        (step("node0", hosts("node0"), PET_RDZV_BACKEND="static"), Outcome.SKIPPED),
        (step("node0", hosts("node0"), PET_NODE_RANK="0"), Outcome.SKIPPED),
        (step("", hosts("node0")), Outcome.SKIPPED),
        (step("node0", hosts("node0", "10.0.0.1")), Outcome.PASSED),
        (step("10.0.0.2", hosts("10.0.0.2", "10.0.0.2")), Outcome.PASSED),
        (step("head", hosts("head", "10.0.0.1")), Outcome.PASSED),
        (step("node0", hosts("node0")), Outcome.PASSED),
        (step("elsewhere", hosts("elsewhere"), missing=(2,)), Outcome.INCONCLUSIVE),
    ],
)
def test_one_host_or_none_to_judge(facts, outcome):
    check, findings = ask("rdzv-host", facts)
    assert (check.outcome, findings) == (outcome, ())


def test_a_second_network_card_is_nobodys():
    cards = (interface("ib0", "10.1.0.1/24"), interface("ib0", "10.1.0.2/24"))
    facts = step("10.1.0.1", hosts("10.1.0.1", "10.1.0.1", cards=cards), SLURM_GPUS_ON_NODE="8")
    _, (finding,) = ask("rdzv-host", facts)
    assert (finding.severity, finding.hosts) == (Severity.WARNING, ("node0",))
    assert "no host matches 10.1.0.1 in MASTER_ADDR: no host starts the store" in finding.summary
    assert "if it is what torchrun gets as --rdzv-endpoint" in finding.summary
    assert "an interface of node0 has the address" in finding.evidence[0]
    assert "--rdzv-endpoint=node0:29400" in finding.fix
    assert "--rdzv-conf is_host=1 on node0" in finding.fix


@pytest.mark.parametrize(
    ("variables", "severity"),
    [
        (C10D | {"PET_RDZV_ENDPOINT": "alias:29500", "MASTER_ADDR": ""}, Severity.ERROR),
        ({"SLURM_GPUS_ON_NODE": "8"}, Severity.WARNING),
        ({"SLURM_GPUS_ON_NODE": "1"}, Severity.INFO),
        ({}, Severity.INFO),
    ],
)
def test_how_sure_the_endpoint_is(variables, severity):
    _, (finding,) = ask("rdzv-host", step("alias", hosts("alias", "10.9.9.9"), **variables))
    assert finding.severity is severity
    assert "compared with the names of node0 and node1" in finding.evidence


@pytest.mark.parametrize(
    ("endpoint", "own"),
    [("shared", ("127.0.1.1", "127.0.1.1")), ("localhost", ("10.0.0.1", "10.0.0.2")), ("127.0.0.1", ("a", "b"))],
)
def test_several_hosts(endpoint, own):
    variables = C10D | {"PET_RDZV_ENDPOINT": f"{endpoint}:29500", "MASTER_ADDR": ""}
    _, (finding,) = ask("rdzv-host", step("", hosts(endpoint, own[0], own=own), **variables))
    assert (finding.severity, finding.hosts) == (Severity.WARNING, ("node0", "node1"))
    assert "node0 and node1 all match" in finding.summary


def test_a_host_whose_own_name_is_not_known():
    unknown = [(names(f"node{index}", error="Name or service not known"), network()) for index in range(2)]
    check, findings = ask("rdzv-host", step("elsewhere", unknown))
    assert (check.outcome, findings) == (Outcome.INCONCLUSIVE, ())


def test_nodes_with_different_endpoints_have_none_in_common():
    first = node("a", processes=[process(0, MASTER_ADDR="a")], names=names("a", "10.0.0.1"), network=network())
    second = node("b", processes=[process(1, MASTER_ADDR="b")], names=names("b", "10.0.0.2"), network=network())
    check, _ = ask("rdzv-host", fleet(first, second, launcher=Launcher.SLURM, world_size=2))
    assert check.outcome is Outcome.SKIPPED
