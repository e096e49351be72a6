import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, node, process
from tests.rules.environment.link_facts import NO_RDMA, ZEROS, hca, port, rdma
from tests.rules.environment.machine_facts import gpus

DOWN, INIT = "DOWN/Polling", "INIT/LinkUp"


def ask_state(*devices, **variables):
    return ask("ib-state", node(rdma=rdma(*devices), gpus=gpus(8), processes=[process(**variables)]))


def test_all_active_passes():
    check, findings = ask_state()
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "4 of 4 ports are active: mlx5_0, mlx5_1, mlx5_2 and mlx5_3"


def test_one_card_of_four_without_a_signal_is_an_error():
    _, (finding,) = ask_state(*(hca(n) for n in range(3)), hca(3, state=DOWN))
    assert finding.severity is Severity.ERROR
    assert finding.summary == (
        "RDMA port mlx5_3 is not active: no signal from the other end: "
        "check the cable, its transceiver and the switch port"
    )
    assert "state DOWN, physical state Polling" in finding.evidence
    assert "mlxlink -d mlx5_3" in finding.fix


def test_ports_in_one_state_are_one_finding():
    _, (finding,) = ask_state(*(hca(n) for n in range(6)), hca(6, state=DOWN), hca(7, state=DOWN))
    assert finding.summary.startswith("RDMA ports mlx5_6 and mlx5_7 are not active")


def test_a_port_without_subnet_manager_says_so():
    _, (finding,) = ask_state(*(hca(n) for n in range(3)), hca(3, state=INIT))
    assert "no subnet manager" in finding.summary
    assert finding.fix.startswith("sminfo -C mlx5_3 -P 1")


def test_one_of_two_cards_is_a_warning():
    _, (finding,) = ask_state(hca(0), hca(1, state=DOWN))
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize("state", ["DOWN/Disabled", DOWN])
def test_an_ethernet_port_is_set_up_by_ip(state):
    devices = [hca(n, link_layer="Ethernet") for n in range(3)]
    _, (finding,) = ask_state(*devices, hca(3, link_layer="Ethernet", state=state))
    assert finding.fix.startswith("ip link set net3 up")


def two_ports(number, second):
    return (
        hca(2 * number, bus_id=f"0000:{0x10 + number:02x}:00.0"),
        hca(2 * number + 1, bus_id=f"0000:{0x10 + number:02x}:00.1", state=second),
    )


@pytest.mark.parametrize(
    "devices",
    [
        (hca(0), hca(1, board="other", state=DOWN)),
        two_ports(0, DOWN),
        (*two_ports(0, DOWN), *two_ports(1, DOWN)),
        (hca(0, ports=(port("mlx4_0"), port("mlx4_0", port=2, state=DOWN)), name="mlx4_0"),),
        (hca(0, state=DOWN), hca(1, state=DOWN)),
        (hca(0, state=DOWN, link_layer="Ethernet"),),
        (*(hca(n) for n in range(3)), hca(3, state=DOWN, virtual_function=True)),
    ],
    ids=["another model", "second port", "second ports", "second port of a device", "spares", "alone", "of a guest"],
)
def test_ports_that_nobody_uses_are_no_fault(devices):
    check, findings = ask_state(*devices)
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_second_ports_are_compared_to_second_ports():
    devices = (*two_ports(0, "ACTIVE/LinkUp"), *two_ports(1, "ACTIVE/LinkUp"), *two_ports(2, DOWN))
    _, (finding,) = ask_state(*devices)
    assert (finding.severity, "mlx5_5" in finding.summary) == (Severity.ERROR, True)


def test_a_port_that_is_asked_for_must_be_up_though_it_has_no_peer():
    _, (finding,) = ask_state(hca(0), hca(1, board="other", state=DOWN), NCCL_IB_HCA="=mlx5_0,mlx5_1")
    assert (finding.severity, "mlx5_1" in finding.summary) == (Severity.ERROR, True)


def test_a_port_that_is_not_asked_for_may_be_down():
    check, _ = ask_state(*(hca(n) for n in range(3)), hca(3, state=DOWN), NCCL_IB_HCA="^=mlx5_3")
    assert check.outcome is Outcome.PASSED


def test_a_whole_network_that_is_dark_is_a_warning_where_gpus_are():
    dark = [hca(n, state=DOWN) for n in range(4)]
    _, (finding,) = ask_state(*dark)
    assert finding.severity is Severity.WARNING
    assert finding.summary.startswith("None of the 4 InfiniBand cards has an active port")
    check, _ = ask("ib-state", node(rdma=rdma(*dark)))
    assert check.outcome is Outcome.PASSED


def test_other_link_layers_are_skipped():
    check, _ = ask_state(hca(0, name="efa_0", link_layer="Unspecified"))
    assert check.outcome is Outcome.SKIPPED


@pytest.mark.parametrize(
    "kind", ["ib-state", "ib-rate", "ib-flap", "roce-gid", "ib-disabled", "peermem", "memlock", "uverbs"]
)
@pytest.mark.parametrize(
    ("unread", "outcome"),
    [(NO_RDMA, Outcome.SKIPPED), (Unread(why=Why.TIMEOUT, reason="too slow"), Outcome.INCONCLUSIVE)],
)
def test_without_rdma_devices_nothing_is_checked(kind, unread, outcome):
    check, findings = ask(kind, node(rdma=unread, processes=[process(NCCL_IB_DISABLE="1")]))
    assert (check.outcome, check.reason, findings) == (outcome, unread.reason, ())


def flapped(number, count, later=None, **changes):
    counters = {"link_downed": count, "symbol_error": 0}
    return hca(number, counters=counters, counters_later=later or counters, **changes)


def test_quiet_links_pass():
    check, findings = ask("ib-flap", node(rdma=rdma()))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "links of 4 ports went down 0 times since their counters began"


def test_a_link_that_went_down_more_often_than_its_peers_is_a_warning():
    _, (finding,) = ask("ib-flap", node(rdma=rdma(*(flapped(n, 1) for n in range(3)), flapped(3, 7))))
    assert finding.severity is Severity.WARNING
    assert finding.summary == "The link of RDMA port mlx5_3 went down 7 times since its counters began"
    assert "link_downed of its 3 peers: 1 to 1" in finding.evidence
    assert "perfquery -R -C mlx5_3 -P 1" in finding.fix


def test_a_card_without_peers_should_never_have_gone_down():
    _, (finding,) = ask("ib-flap", node(rdma=rdma(flapped(0, 1))))
    assert finding.summary == "The link of RDMA port mlx5_0 went down once since its counters began"


@pytest.mark.parametrize(
    "devices",
    [
        tuple(flapped(n, 2) for n in range(4)),
        (*(flapped(n, 0) for n in range(3)), flapped(3, 4, state=DOWN)),
        (*(flapped(n, 3) for n in range(3)), flapped(3, 1)),
    ],
    ids=["the switch was restarted", "not in use", "less than others"],
)
def test_counts_that_mean_nothing_pass(devices):
    check, _ = ask("ib-flap", node(rdma=rdma(*devices)))
    assert check.outcome is Outcome.PASSED


def test_a_link_that_goes_down_now_is_an_error():
    _, (finding,) = ask("ib-flap", node(rdma=rdma(hca(0), flapped(1, 3, {"link_downed": 4, "symbol_error": 0}))))
    assert finding.severity is Severity.ERROR
    assert finding.summary == "The link of RDMA port mlx5_1 went down during this check"
    assert "link_downed rose by 1 within half a second" in finding.evidence


def test_a_link_that_makes_errors_now_is_a_warning():
    _, (finding,) = ask("ib-flap", node(rdma=rdma(flapped(0, 0, {"link_downed": 0, "symbol_error": 40}))))
    assert (finding.severity, finding.summary) == (
        Severity.WARNING,
        "The link of RDMA port mlx5_0 has errors right now",
    )


def test_counters_that_were_reset_or_lost_between_two_looks_are_no_errors():
    check, _ = ask("ib-flap", node(rdma=rdma(hca(0, counters_later={}), hca(1, counters={**ZEROS, "symbol_error": 9}))))
    assert check.outcome is Outcome.PASSED


def test_without_counters_there_is_nothing_to_look_at():
    check, _ = ask("ib-flap", node(rdma=rdma(hca(0, counters={}))))
    assert check.outcome is Outcome.SKIPPED
