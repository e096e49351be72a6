import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from tests.rules.environment.build import ask, fleet, node, process
from tests.rules.environment.link_facts import GIDS, gid, hca, rdma, roce

BARE = GIDS[:2]
SHIFTED = (*BARE, gid(2, "IPv6", "IB/RoCE v1"), gid(3, "IPv6"), gid(4, "IPv4", "IB/RoCE v1"), gid(5))


def cards(count=2, **changes):
    return rdma(*(roce(n, **changes) for n in range(count)))


def ask_gid(section, **variables):
    return ask("roce-gid", node(rdma=section, processes=[process(**variables)]))


def test_v2_with_ipv4_passes():
    check, findings = ask_gid(cards())
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "mlx5_0 and mlx5_1: an entry that is RoCE v2 with IPv4"


def test_infiniband_has_no_such_addresses():
    check, _ = ask_gid(rdma(hca(0)))
    assert check.outcome is Outcome.SKIPPED


def test_a_training_network_without_ipv4_is_an_error():
    _, (finding,) = ask_gid(cards(gids=BARE))
    assert finding.severity is Severity.ERROR
    assert finding.summary.startswith("mlx5_0 and mlx5_1 have no RoCE v2 address with IPv4")
    assert finding.evidence == ("entries in use: IB/RoCE v1 link-local, RoCE v2 link-local",)
    assert "ip addr add ADDRESS/PREFIX dev net0" in finding.fix


@pytest.mark.parametrize(
    "section",
    [rdma(roce(0, gids=BARE)), rdma(roce(0, gids=BARE, rate=25.0), roce(1, rate=25.0))],
    ids=["alone", "slow"],
)
def test_an_everyday_card_without_ipv4_is_only_noted(section):
    _, (finding,) = ask_gid(section)
    assert finding.severity is Severity.INFO


def test_a_card_that_is_asked_for_is_no_everyday_card():
    _, (finding,) = ask_gid(rdma(roce(0, gids=BARE)), NCCL_IB_HCA="=mlx5_0")
    assert finding.severity is Severity.ERROR


def test_ipv6_counts_where_it_is_asked_for():
    section = cards(gids=(*BARE, gid(2, "IPv6", "IB/RoCE v1"), gid(3, "IPv6")))
    assert ask_gid(section, NCCL_IB_ADDR_FAMILY="AF_INET6")[0].outcome is Outcome.PASSED
    assert ask_gid(section)[0].outcome is Outcome.FAILED


def test_ports_that_nccl_leaves_out_need_no_address():
    section = rdma(roce(0), roce(1, gids=BARE), roce(2, gids=BARE, state="DOWN/Polling"))
    assert ask_gid(section, NCCL_IB_HCA="^=mlx5_1")[0].outcome is Outcome.PASSED


@pytest.mark.parametrize("value", ["3", "-1", "", "auto"])
def test_a_right_index_passes(value):
    assert ask_gid(cards(), NCCL_IB_GID_INDEX=value)[0].outcome is Outcome.PASSED


def test_an_empty_entry_is_an_error():
    _, (finding,) = ask_gid(cards(), NCCL_IB_GID_INDEX="7")
    assert finding.severity is Severity.ERROR
    assert finding.summary == "NCCL_IB_GID_INDEX=7 selects an empty entry of the address table of mlx5_0 and mlx5_1"
    assert finding.evidence == ("RoCE v2 with IPv4 is entry 3 on all 2 ports",)
    assert finding.fix == "unset NCCL_IB_GID_INDEX (since NCCL 2.21 it picks the entry itself)"


def test_a_v1_entry_is_an_error_where_there_is_a_better_one():
    _, (finding,) = ask_gid(cards(), NCCL_IB_GID_INDEX="2")
    assert (finding.severity, "a RoCE v1 entry" in finding.summary) == (Severity.ERROR, True)


def test_a_v1_entry_is_a_warning_where_there_is_none():
    _, (finding,) = ask_gid(cards(gids=GIDS[:1]), NCCL_IB_GID_INDEX="0")
    assert finding.severity is Severity.WARNING


def test_an_entry_of_another_interface_is_a_warning():
    section = rdma(roce(0, gids=(*GIDS, gid(4, netdev="net0.100", version="RoCE v2"))))
    _, (finding,) = ask_gid(section, NCCL_IB_GID_INDEX="4")
    assert (finding.severity, "another interface (net0.100)" in finding.summary) == (Severity.WARNING, True)


def test_the_entries_of_a_bond_are_its_own():
    section = rdma(roce(0, gids=tuple(gid(n, netdev="bond0") for n in range(4)), netdevs=("p0", "p1")))
    assert ask_gid(section, NCCL_IB_GID_INDEX="3")[0].outcome is Outcome.PASSED


def test_an_entry_that_a_container_cannot_see_is_a_warning():
    section = rdma(roce(0, gids=(gid(3, version="", netdev=None),)))
    _, (finding,) = ask_gid(section, NCCL_IB_GID_INDEX="3")
    assert finding.severity is Severity.WARNING


def host(number, section, **variables):
    return node(f"node{number}", rdma=section, processes=[process(number, **variables)])


def test_an_index_that_means_two_things_is_named_with_the_minority():
    index = {"NCCL_IB_GID_INDEX": "3"}
    hosts = [host(n, cards(), **index) for n in range(3)]
    _, (finding,) = ask("roce-gid", fleet(*hosts, host(3, cards(gids=SHIFTED), **index)))
    assert finding.summary.endswith("it is RoCE v2 IPv6 on node3, RoCE v2 IPv4 on 3 others")
    assert (finding.severity, finding.hosts, finding.confidence) == (Severity.ERROR, ("node3",), Confidence.HIGH)


def test_hosts_that_let_nccl_choose_may_differ():
    check, _ = ask("roce-gid", fleet(host(0, cards()), host(1, cards(gids=SHIFTED))))
    assert (check.outcome, check.seen.endswith("on 2 hosts")) == (Outcome.PASSED, True)


def test_hosts_with_one_fault_are_one_finding():
    _, (finding,) = ask("roce-gid", fleet(host(0, cards(gids=BARE)), host(1, cards(gids=BARE))))
    assert finding.hosts == ("node0", "node1")
