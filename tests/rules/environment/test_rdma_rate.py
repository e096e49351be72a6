import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from tests.rules.environment.build import ask, fleet, node
from tests.rules.environment.link_facts import NO_RDMA, hca, rdma

LAMED = {"rate": 100.0, "rate_text": "100 Gb/sec (1X NDR)"}


def test_equal_rates_pass():
    check, findings = ask("ib-rate", node(rdma=rdma()))
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, "active ports: 4 at 400 Gb/s", ())


def test_a_port_that_lost_lanes_is_an_error():
    _, (finding,) = ask("ib-rate", node(rdma=rdma(*(hca(n) for n in range(7)), hca(7, **LAMED))))
    assert finding.severity is Severity.ERROR
    assert finding.summary == "RDMA port mlx5_7 runs at 100 Gb/s, but 7 others of the same model at 400 Gb/s"
    assert finding.evidence == ("rate: 100 Gb/sec (1X NDR)",)
    assert finding.hosts == ("node0",)
    assert "mlxlink -d mlx5_7 -m" in finding.fix


def test_a_slow_host_is_named_once():
    hosts = [node(f"node{n}", rdma=rdma()) for n in range(3)]
    slow = node("node3", rdma=rdma(*(hca(n, rate=200.0) for n in range(4))))
    _, (finding,) = ask("ib-rate", fleet(*hosts, slow))
    assert finding.summary.startswith(
        "RDMA ports mlx5_0, mlx5_1, mlx5_2 and mlx5_3 on node3 run at 200 Gb/s, but 12 others"
    )
    assert (finding.hosts, finding.confidence) == (("node3",), Confidence.HIGH)


def test_half_of_the_hosts_leave_it_open_who_is_right():
    one, other = node("node0", rdma=rdma(hca(0))), node("node1", rdma=rdma(hca(0, rate=200.0)))
    _, (finding,) = ask("ib-rate", fleet(one, other))
    assert (finding.severity, finding.confidence) == (Severity.WARNING, Confidence.LOW)


def test_two_ethernet_cards_of_a_host_may_be_on_two_networks():
    cards = (hca(0, link_layer="Ethernet", rate=25.0), hca(1, link_layer="Ethernet", rate=100.0))
    _, (finding,) = ask("ib-rate", node(rdma=rdma(*cards)))
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    "devices",
    [
        (hca(0), hca(1), hca(2), hca(3, state="DOWN/Polling", rate=10.0)),
        (hca(0), hca(1), hca(2, board="other", rate=100.0)),
        (hca(0), hca(1), hca(2, bus_id="0000:10:00.1", rate=100.0)),
        (hca(0),),
    ],
    ids=["down", "another model", "second port", "alone"],
)
def test_ports_that_need_not_be_alike_pass(devices):
    check, _ = ask("ib-rate", node(rdma=rdma(*devices)))
    assert check.outcome is Outcome.PASSED


def test_a_host_that_lost_a_card_is_a_warning():
    hosts = [node(f"node{n}", rdma=rdma()) for n in range(3)]
    _, (finding,) = ask("ib-rate", fleet(*hosts, node("node3", rdma=rdma(*(hca(n) for n in range(3))))))
    assert finding.severity is Severity.WARNING
    assert finding.summary.endswith("MT_0000000838 devices: 3 on node3, 4 on 3 others")
    assert finding.hosts == ("node3",)


def test_a_host_without_any_card_is_one_that_lost_them():
    hosts = [node(f"node{n}", rdma=rdma()) for n in range(2)]
    _, (finding,) = ask("ib-rate", fleet(*hosts, node("node2", rdma=NO_RDMA)))
    assert "0 on node2" in finding.summary


def test_no_active_port_passes():
    check, _ = ask("ib-rate", node(rdma=rdma(hca(0, state="DOWN/Polling"))))
    assert (check.outcome, check.seen) == (Outcome.PASSED, "no RDMA port is active")
