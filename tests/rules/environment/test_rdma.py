import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import ConfFile, Limit
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import (
    GIB,
    GIDS,
    MIB,
    NO_RDMA,
    ZEROS,
    ask,
    fleet,
    gid,
    gpus,
    hca,
    limits,
    node,
    port,
    process,
    rdma,
    roce,
)

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


NO_DRIVER = Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")
EVERYDAY = rdma(roce(0, rate=25.0), uverbs=(), peermem=False, dmabuf=False)


@pytest.mark.parametrize("kind", ["peermem", "memlock", "uverbs"])
def test_nobody_uses_rdma_without_a_gpu(kind):
    section = rdma(peermem=False, dmabuf=False, uverbs=())
    little = limits(memlock=Limit(soft=65536, hard=65536))
    check, _ = ask(kind, node(rdma=section, gpus=NO_DRIVER, limits=little))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, NO_DRIVER.reason)
    check, _ = ask(kind, node(rdma=section, gpus=gpus(0), limits=little))
    assert check.outcome is Outcome.SKIPPED


@pytest.mark.parametrize("kind", ["peermem", "memlock", "uverbs"])
def test_the_everyday_card_of_a_machine_is_no_rdma_network(kind):
    little = limits(memlock=Limit(soft=65536, hard=65536))
    check, _ = ask(kind, node(rdma=EVERYDAY, gpus=gpus(8), limits=little))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, "no RDMA network is up here")


@pytest.mark.parametrize(
    ("peermem", "dmabuf", "outcome"),
    [
        (True, False, Outcome.PASSED),
        (False, True, Outcome.PASSED),
        (False, None, Outcome.INCONCLUSIVE),
        (False, False, Outcome.FAILED),
    ],
)
def test_peermem_or_dmabuf_is_needed(peermem, dmabuf, outcome):
    check, findings = ask("peermem", node(rdma=rdma(peermem=peermem, dmabuf=dmabuf), gpus=gpus(8)))
    assert check.outcome is outcome
    if findings:
        assert findings[0].severity is Severity.WARNING
        assert findings[0].fix == "modprobe nvidia-peermem (on the host)"


def test_geforce_cannot_do_it():
    section = rdma(peermem=False, dmabuf=False)
    check, _ = ask("peermem", node(rdma=section, gpus=gpus(2, name="NVIDIA GeForce RTX 4090")))
    assert check.outcome is Outcome.SKIPPED


def ask_memlock(soft, hard, section=None, **variables):
    facts = node(
        rdma=section or rdma(),
        gpus=gpus(8),
        limits=limits(memlock=Limit(soft=soft, hard=hard)),
        processes=[process(**variables)],
    )
    return ask("memlock", facts)


@pytest.mark.parametrize(
    ("soft", "severity", "words"),
    [
        (65536, Severity.ERROR, "64 KiB"),
        (8 * MIB, Severity.ERROR, "8 MiB"),
        (GIB - 1, Severity.ERROR, "1023 MiB"),
        (GIB, Severity.WARNING, "1 GiB"),
        (64 * GIB - 1, Severity.WARNING, "64 GiB"),
    ],
)
def test_a_limit_on_locked_memory(soft, severity, words):
    _, (finding,) = ask_memlock(soft, soft)
    assert finding.severity is severity
    assert finding.summary == f"RDMA can lock only {words} of memory: NCCL fails if it registers more"
    assert "--ulimit memlock=-1" in finding.fix
    assert "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf" in finding.fix


@pytest.mark.parametrize("soft", [None, 64 * GIB])
def test_enough_locked_memory_passes(soft):
    assert ask_memlock(soft, soft)[0].outcome is Outcome.PASSED


def test_a_capability_makes_the_limit_void():
    check, _ = ask_memlock(8 * MIB, 8 * MIB, rdma(ipc_lock=True))
    assert (check.outcome, "CAP_IPC_LOCK" in check.seen) == (Outcome.PASSED, True)


def test_the_shell_mends_a_soft_limit():
    _, (finding,) = ask_memlock(8 * MIB, None)
    assert finding.fix == "ulimit -l unlimited"


def test_slurm_hands_limits_on():
    _, (finding,) = ask_memlock(8 * MIB, 8 * MIB, SLURM_JOB_ID="7")
    assert "PropagateResourceLimitsExcept=MEMLOCK" in finding.fix


def test_efa_locks_memory_too():
    efa = rdma(hca(0, name="rdmap16s27", link_layer="Unspecified"))
    assert ask_memlock(8 * MIB, 8 * MIB, efa)[0].outcome is Outcome.FAILED


def test_devices_that_cannot_be_opened_come_first():
    check, _ = ask_memlock(8 * MIB, 8 * MIB, rdma(uverbs=()))
    assert check.outcome is Outcome.SKIPPED


def test_a_limit_that_is_not_known_is_no_answer():
    facts = node(rdma=rdma(), gpus=gpus(8), limits=limits(memlock=None))
    assert ask("memlock", facts)[0].outcome is Outcome.INCONCLUSIVE


def ask_uverbs(section, **variables):
    return ask("uverbs", node(rdma=section, gpus=gpus(8), processes=[process(0, **variables)]))


def test_device_files_that_open_pass():
    check, _ = ask_uverbs(rdma())
    assert (check.outcome, check.seen) == (Outcome.PASSED, "4 of 4 devices can be opened")


@pytest.mark.parametrize(
    ("variables", "severity"),
    [
        ({}, Severity.WARNING),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, Severity.WARNING),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}, Severity.ERROR),
        ({"NCCL_IB_HCA": "mlx5"}, Severity.ERROR),
        ({"NCCL_NET": "IB"}, Severity.ERROR),
    ],
)
def test_files_that_are_missing(variables, severity):
    _, (finding,) = ask_uverbs(rdma(uverbs=()), **variables)
    assert finding.severity is severity
    assert finding.summary.startswith("This process cannot use RDMA: /dev/infiniband/uverbs0")
    assert "are missing" in finding.summary
    assert finding.fix.startswith("docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1")


def test_files_that_may_not_be_opened():
    files = tuple(f"uverbs{n}" for n in range(4))
    _, (finding,) = ask_uverbs(rdma(uverbs=(), uverbs_denied=files))
    assert "cannot be opened" in finding.summary
    assert finding.fix.startswith("ls -l /dev/infiniband")


def test_a_module_that_is_not_loaded():
    _, (finding,) = ask_uverbs(rdma(hca(0, uverbs=None), uverbs=()))
    assert finding.fix == "modprobe ib_uverbs (on the host)"


def test_a_pod_with_some_of_the_devices_passes():
    check, _ = ask_uverbs(rdma(uverbs=("uverbs2",)))
    assert (check.outcome, check.seen) == (Outcome.PASSED, "1 of 4 devices can be opened")


def test_a_device_that_is_asked_for_and_not_given():
    _, (finding,) = ask_uverbs(rdma(uverbs=("uverbs2",)), NCCL_IB_HCA="=mlx5_1,mlx5_2")
    assert (finding.severity, "uverbs1 is missing" in finding.summary) == (Severity.ERROR, True)


ELEVEN = tuple(hca(number) for number in range(11))


def conf(**variables):
    return (ConfFile(path="/etc/nccl.conf", variables=variables, hidden_by_env=(), hidden_by_file=(), bad_lines=()),)


def ask_hca(value, *devices, files=()):
    variables = {} if value is None else {"NCCL_IB_HCA": value}
    return ask("ib-hca-env", node(rdma=rdma(*devices), conf_files=files, processes=[process(**variables)]))


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, "NCCL_IB_HCA is not set: NCCL uses every active port"),
        ("mlx5", "NCCL_IB_HCA=mlx5 matches 4 of 4 ports: mlx5_0, mlx5_1, mlx5_2 and mlx5_3"),
        ("=mlx5_0,mlx5_1", "NCCL_IB_HCA==mlx5_0,mlx5_1 matches 2 of 4 ports: mlx5_0 and mlx5_1"),
        ("^mlx5_3", "NCCL_IB_HCA=^mlx5_3 matches 3 of 4 ports: mlx5_0, mlx5_1 and mlx5_2"),
        ("mlx5_0:1", "NCCL_IB_HCA=mlx5_0:1 matches 1 of 4 ports: mlx5_0"),
    ],
)
def test_values_that_fit_pass(value, seen):
    check, findings = ask_hca(value)
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, seen, ())


@pytest.mark.parametrize("value", ["mlx4_0", "=mlx5", "mlx5_0:2", "MLX5_0", " mlx5_0"])
def test_a_value_that_matches_nothing_is_an_error(value):
    _, (finding,) = ask_hca(value)
    assert finding.severity is Severity.ERROR
    assert finding.summary == (f"NCCL_IB_HCA={value} matches no RDMA device of this machine: NCCL will use TCP sockets")
    assert finding.evidence[0] == "devices here: mlx5_0, mlx5_1, mlx5_2 and mlx5_3"
    assert finding.fix == "export NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3"


def test_a_value_that_excludes_all_is_an_error():
    _, (finding,) = ask_hca("^mlx5")
    assert finding.summary.startswith("NCCL_IB_HCA=^mlx5 excludes every RDMA device")


def test_an_entry_that_matches_nothing_beside_one_that_does_is_a_warning():
    _, (finding,) = ask_hca("=mlx5_0,mlx5_9")
    assert (finding.severity, finding.summary) == (
        Severity.WARNING,
        "mlx5_9 in NCCL_IB_HCA==mlx5_0,mlx5_9 matches no RDMA device of this machine",
    )


def test_a_second_equals_sign_is_pointed_out():
    _, (finding,) = ask_hca("=mlx5_0,=mlx5_1")
    assert "= and ^ are only allowed once, before the whole list, not in =mlx5_1" in finding.evidence


def test_a_name_that_is_a_beginning_takes_more_than_was_meant():
    _, (finding,) = ask_hca("mlx5_0,mlx5_1", *ELEVEN)
    assert finding.severity is Severity.WARNING
    assert finding.summary == ("mlx5_1 in NCCL_IB_HCA=mlx5_0,mlx5_1 also takes mlx5_10: entries are prefixes of names")
    assert finding.fix == "export NCCL_IB_HCA==mlx5_0,mlx5_1"


def test_likewise_it_excludes_more():
    _, (finding,) = ask_hca("^mlx5_1", *ELEVEN)
    assert "also excludes mlx5_10" in finding.summary
    assert finding.fix == "export NCCL_IB_HCA=^=mlx5_1"


@pytest.mark.parametrize("value", ["mlx5_1,mlx5_10", "mlx5", "=mlx5_1"])
def test_what_was_meant_so_passes(value):
    assert ask_hca(value, *ELEVEN)[0].outcome is Outcome.PASSED


def test_a_value_of_a_file_is_named_with_the_file():
    _, (finding,) = ask_hca(None, files=conf(NCCL_IB_HCA="mlx4"))
    assert finding.summary.startswith("NCCL_IB_HCA=mlx4 in /etc/nccl.conf matches no RDMA device")
    assert (finding.code, finding.kind) == ("DD115", "nccl-conf")
    assert finding.fix == "remove NCCL_IB_HCA from /etc/nccl.conf"


def test_without_devices_it_is_an_error_only_where_gpus_are():
    processes = [process(NCCL_IB_HCA="mlx5_0")]
    _, (finding,) = ask("ib-hca-env", node(rdma=NO_RDMA, gpus=gpus(8), processes=processes))
    assert finding.severity is Severity.ERROR
    check, _ = ask("ib-hca-env", node(rdma=NO_RDMA, processes=processes))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, "there is no RDMA device")
    check, _ = ask("ib-hca-env", node(rdma=NO_RDMA, gpus=gpus(8)))
    assert check.outcome is Outcome.SKIPPED


def test_it_does_not_apply_to_efa():
    assert ask_hca("mlx5", hca(0, name="efa_0", link_layer="Unspecified"))[0].outcome is Outcome.SKIPPED


def ask_disabled(section, files=(), **variables):
    return ask("ib-disabled", node(rdma=section, conf_files=files, processes=[process(**variables)]))


@pytest.mark.parametrize("variables", [{}, {"NCCL_IB_DISABLE": "0"}, {"NCCL_NET": "IB"}, {"NCCL_IB_DISABLE": "no"}])
def test_rdma_that_is_on_passes(variables):
    assert ask_disabled(rdma(), **variables)[0].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("variables", "fix"),
    [({"NCCL_IB_DISABLE": "1"}, "unset NCCL_IB_DISABLE"), ({"NCCL_NET": "Socket"}, "unset NCCL_NET")],
)
@pytest.mark.parametrize("section", [rdma(), rdma(roce(0), roce(1))], ids=["InfiniBand", "RoCE"])
def test_a_network_that_is_switched_off_is_a_warning(section, variables, fix):
    _, (finding,) = ask_disabled(section, **variables)
    assert (finding.severity, finding.fix) == (Severity.WARNING, fix)
    assert finding.summary.endswith("disables this machine's RDMA network: NCCL will use TCP sockets")


def test_a_file_may_switch_it_off():
    _, (finding,) = ask_disabled(rdma(), conf(NCCL_NET="Socket"))
    assert (finding.kind, finding.fix) == ("nccl-conf", "remove NCCL_NET from /etc/nccl.conf")


def test_ib_disable_in_a_file_is_left_to_nccl_conf():
    assert ask_disabled(rdma(), conf(NCCL_IB_DISABLE="1"))[0].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    "section",
    [rdma(roce(0)), rdma(roce(0, rate=25.0), roce(1, rate=25.0)), rdma(hca(0, state="DOWN/Polling"))],
    ids=["one Ethernet card", "slow Ethernet cards", "down"],
)
def test_an_everyday_card_may_be_left_alone(section):
    check, _ = ask_disabled(section, NCCL_IB_DISABLE="1")
    assert (check.outcome, "no port is on a training network" in check.seen) == (Outcome.PASSED, True)


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
