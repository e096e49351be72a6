"""A collective that all ranks are in and that does not end: what is to be checked, and what the machine shows."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.progress import judge_job as judge
from ddpdoctor.model.causes import Connection, Connections, NcclLine, ProcessCauses
from ddpdoctor.model.facts import GroupState
from ddpdoctor.model.findings import Confidence

from .build import LONG_AGO, NOW, S, failed_in, in_backward, in_call, in_user, job
from .environment.build import node
from .environment.network import interface, network

LOST = Connection(local="10.0.0.4:4000", remote="10.0.0.4:5000", unsent_bytes=76, retries=4)


def connected(rank, end, *stalled):
    address = end.rpartition(":")[0]
    found = Connections(by_address=((address, 2),), ends=(end,), stalled=stalled)
    return replace(rank, causes=ProcessCauses(connections=found))


def over(backend, *ranks, **more):
    """A job in which all ranks are inside one collective of a backend."""
    reported = [
        replace(rank, groups=(GroupState(name="0", ranks=(0, 1), backend=backend, enqueued=7),), host=f"node{number}")
        for number, rank in enumerate(ranks or (in_call(0, world=2), in_call(1, world=2)))
    ]
    return job(*reported, **more)


def on_one_host(backend, *ranks, **more):
    found = over(backend, *ranks, **more)
    return replace(found, ranks=tuple(replace(rank, host="node0") for rank in found.ranks))


def finding_of(found):
    findings = judge(found).findings
    assert [finding.kind for finding in findings] == ["transport"]
    assert findings[0].ranks == tuple(rank.rank for rank in found.ranks)
    return findings[0]


CHECKS = {
    "gloo on one host": (on_one_host("gloo"), "1. packet filters, including on loopback"),
    "gloo on two hosts": (over("gloo"), "1. the interface that Gloo uses"),
    "nccl on one host": (on_one_host("nccl"), "1. GPU errors"),
    "nccl on two hosts": (over("nccl"), "1. the interface that NCCL uses"),
    "nccl beside gloo": (over("cpu:gloo,cuda:nccl"), "1. the interface that NCCL uses"),
    "a backend that nobody names": (on_one_host(""), "1. packet filters"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_to_check_comes_in_the_order_of_likelihood(name):
    found, first = CHECKS[name]
    finding = finding_of(found)
    assert finding.fix.startswith(f"check in this order: {first}"), finding.fix
    assert finding.confidence is Confidence.LOW


def test_data_that_nobody_acknowledges_name_the_ranks_and_the_way():
    ranks = (connected(in_call(0, world=2), "10.0.0.4:4000", LOST), connected(in_call(1, world=2), "10.0.0.4:5000"))
    finding = finding_of(on_one_host("gloo", *ranks))
    assert finding.evidence[0] == (
        "data from rank 0 to rank 1 is not acknowledged: 10.0.0.4:4000 to 10.0.0.4:5000, 76 bytes are waiting, "
        "resent 4 times"
    )
    assert finding.fix.startswith("packets from 10.0.0.4 to itself are lost")
    assert finding.confidence is Confidence.MEDIUM


def test_only_lost_packets_distinguish_a_collective_of_ddp_from_one_that_is_slow():
    slow = (in_backward(0, world=2), in_backward(1, world=2))
    lost = (connected(slow[0], "10.0.0.4:4000", LOST), connected(slow[1], "10.0.0.4:5000"))
    assert judge(on_one_host("gloo", *slow)).certain is False
    assert judge(on_one_host("gloo", *lost)).certain is True


MACHINES = {
    "the interface in use is down": (
        network(interface("eth0", "10.0.0.4/24", up=False)), {},
        "the ranks' connections use eth0 (10.0.0.4), which is down", "ip link set dev eth0 up"),
    "the address in use is gone": (
        network(interface("eth0", "10.0.0.9/24")), {},
        "the ranks' connections use 10.0.0.4, but no interface has that address anymore", "what removed 10.0.0.4"),
    "a variable names what is not there": (
        network(interface("eth0", "10.0.0.4/24")), {"GLOO_SOCKET_IFNAME": "eth7"}, "(DD211)", "GLOO_SOCKET_IFNAME"),
    "nothing is wrong with it": (
        network(interface("eth0", "10.0.0.4/24")), {},
        "the ranks' TCP connections use eth0 (10.0.0.4)", "check in this order"),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_what_the_machine_shows_is_reported(name):
    seen, variables, said, fix = MACHINES[name]
    first = node(network=seen).processes[0]
    machine = node(processes=(replace(first, variables=variables),), network=seen)
    ranks = (connected(in_call(0, world=2), "10.0.0.4:4000"), connected(in_call(1, world=2), "10.0.0.4:5000"))
    finding = finding_of(on_one_host("gloo", *ranks, machine=machine))
    assert any(said in text for text in finding.evidence), finding.evidence
    assert fix in finding.fix, finding.fix


def test_the_machine_of_one_host_says_nothing_about_the_connections_of_another():
    machine = replace(node(network=network(interface("eth0", "10.0.0.4/24"))), host="node0")
    ranks = (connected(in_call(0, world=2), "10.0.0.4:4000", LOST), connected(in_call(1, world=2), "10.0.0.5:5000"))
    finding = finding_of(over("gloo", *ranks, machine=machine))
    assert finding.evidence[0].startswith("data from rank 0"), finding.evidence
    assert "on node0: the ranks' TCP connections use eth0 (10.0.0.4)" in finding.evidence
    assert finding.fix.startswith("packets from 10.0.0.4"), finding.fix


def test_nccls_own_warnings_are_evidence():
    lines = (NcclLine(pid=1000, source="transport/net_ib.cc:1", text="Got completion with error 12"),)
    assert "NCCL warns (transport/net_ib.cc:1): Got completion with error 12" in (
        finding_of(over("nccl", nccl_lines=lines)).evidence
    )


WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=16, "
    "NumelOut=16, Timeout(ms)=20000) ran for 20035 milliseconds before timing out."
)
GLOO = "[../gloo/transport/tcp/unbound_buffer.cc:119] Timed out waiting 20000ms for recv operation to complete"
GAVE_UP = {
    WATCHDOG: "the NCCL watchdog gave up on ALLREDUCE, collective 7 of its group after 20 s",
    GLOO: "Gloo gave up",
}


@pytest.mark.parametrize("text", GAVE_UP)
def test_ranks_that_all_waited_for_their_limit_did_not_crash(text):
    late = LONG_AGO + 21 * S
    ranks = (
        failed_in(0, "all_reduce", 7, message=text, at=late, world=2),
        failed_in(1, "all_reduce", 7, message="Connection closed by peer", at=late + S, world=2),
    )
    finding = finding_of(on_one_host("gloo", *ranks, ended=True, now_ns=NOW))
    assert any(GAVE_UP[text] in sentence for sentence in finding.evidence), finding.evidence


def test_a_text_that_names_a_limit_which_has_not_passed_is_a_crash():
    text = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1800000 ms"
    ranks = (
        failed_in(0, "all_reduce", 7, message=text, world=2),
        failed_in(1, "all_reduce", 7, message="out of luck", at=LONG_AGO, world=2),
    )
    assert [finding.kind for finding in judge(on_one_host("gloo", *ranks, ended=True)).findings] == ["crash"]


def test_lost_packets_do_not_excuse_a_rank_that_does_not_come():
    held = connected(in_user(1, world=2), "10.0.0.4:5000")
    waiting = connected(in_call(0, world=2), "10.0.0.4:4000", LOST)
    assert judge(job(waiting, held)).findings[0].kind == "stuck"
