"""What could explain a low number: processors, interfaces, NCCL's ways, variables."""

from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import Collective, Reason
from ddpdoctor.model.node import ConfFile
from ddpdoctor.rules.bandwidth.reasons import (
    Effect,
    Weighed,
    nccl_reasons,
    network_reasons,
    order,
    processor_reasons,
    variable_reasons,
    view,
)
from tests.rules.bandwidth.build import bench_of, governor, load, log, machine, reported
from tests.rules.environment.build import (
    NO_RDMA,
    all_named,
    fleet,
    gpus_of,
    hca,
    interface,
    limits,
    names,
    network,
    rdma,
)

TWO = ("node0", "node0")
APART = ("node0", "node1")


def texts(question, seen, *nodes):
    return [f"{effect} {reason.text}" for effect, reason in reported(question, seen, *nodes)]


# Order


def test_what_explains_most_comes_first_and_equal_reasons_of_hosts_are_one():
    def weighed(effect, text, host, ranks=()):
        return Weighed(effect=effect, reason=Reason(text=text, source="s", hosts=(host,), ranks=ranks))

    small, large, again = (
        weighed(Effect.SMALL, "small", "a"), weighed(Effect.OTHER_WAY, "large", "a", (1,)),
        weighed(Effect.OTHER_WAY, "large", "b", (0,)),
    )  # fmt: skip

    assert [(one.text, one.hosts, one.ranks) for one in order([small, large, again])] == [
        ("large", ("a", "b"), (0, 1)),
        ("small", ("a",), ()),
    ]


def test_a_bench_without_machines_has_no_reasons():
    seen = view(bench_of(*TWO, backend="nccl", logs=[log(0, "Socket", SHM=2)]), None)
    assert [*processor_reasons(seen), *network_reasons(seen), *nccl_reasons(seen), *variable_reasons(seen)] == []


def test_a_machine_that_was_read_without_a_launcher_is_the_one_that_all_ranks_are_on():
    seen = view(bench_of("node0"), fleet(machine(ranks=(None,))))
    assert [place.ranks for place in seen.places] == [(0,)]


def test_machines_without_a_rank_of_the_bench_are_left_out():
    seen = view(bench_of("node0"), fleet(machine(ranks=(0,)), machine("node1", ranks=(7,))))
    assert [place.node.host for place in seen.places] == ["node0"]


# Processors


@pytest.mark.parametrize(
    ("cpus", "changes", "expected"),
    [
        (((0, 1),), {}, []),
        (((0,), (1,)), {}, []),  # each bound to one of its own
        (((0,),), {}, ["LIMIT 2 ranks share 1 CPU of the machine's 8"]),
        (((0, 1, 2, 3),), {"cpu_quota": 1.5}, ["LIMIT 2 ranks share a quota of 1.5 CPUs"]),
        (((0, 1, 2, 3),), {"cpu_quota": 2.0}, []),
        (((0,),), {"cpu_quota": 4.0}, ["LIMIT 2 ranks share 1 CPU of the machine's 8"]),
        (((),), {}, []),  # nobody says
    ],
)
def test_more_ranks_than_processors(cpus, changes, expected):
    seen = texts(processor_reasons, bench_of(*TWO), machine(cpus=cpus, limits=limits(cpus_online=8, **changes)))
    assert [text.partition(":")[0] for text in seen] == expected


def test_one_rank_with_less_than_a_processor():
    one = machine(ranks=(0,), cpus=((0, 1),), limits=limits(cpu_quota=0.5))
    (text,) = texts(processor_reasons, bench_of("node0"), one)
    assert text.startswith("LIMIT 1 rank has a quota of 0.5 CPUs")


def test_more_ranks_than_processors_where_limits_could_not_be_read():
    ((effect, reason),) = reported(processor_reasons, bench_of(*TWO), machine(cpus=((0,),)))
    assert (effect, reason.source, reason.ranks) == ("LIMIT", "sched_getaffinity", (0, 1))
    assert reason.text == "2 ranks share 1 CPU: a collective waits for ranks that have no core"
    assert reason.fix.startswith("start at most 1 rank here")


@pytest.mark.parametrize(
    ("cpus", "busy", "expected"),
    [
        (((0, 1),), {}, []),
        (((0, 1),), {0: 0.2}, []),  # daemons
        (((0, 1),), {0: 1.0}, [(0, 1)]),
        (((0, 1),), {0: 0.15, 1: 0.15}, [(0, 1)]),
        (((0, 1, 2, 3),), {0: 1.0, 1: 1.0}, []),  # two are left for two
        (((0, 1, 2, 3),), {0: 1.0, 1: 1.0, 2: 0.3}, [(0, 1)]),
        (((0, 1),), {2: 1.0, 3: 1.0}, []),  # none of ours
        (((0,), (1,)), {1: 1.0}, [(1,)]),  # its own processor is taken from one rank
        (((0,), (1,)), {1: 0.2}, []),
    ],
)
def test_a_busy_machine(cpus, busy, expected):
    found = reported(processor_reasons, bench_of(*TWO), machine(cpus=cpus, load=load(busy)))
    assert [(effect, reason.ranks) for effect, reason in found] == [("SHARED", ranks) for ranks in expected]


def test_the_words_of_a_busy_machine():
    ((_, reason),) = reported(processor_reasons, bench_of(*TWO), machine(cpus=((0,), (1,)), load=load({1: 0.96})))
    assert reason.text == "other processes kept 1.0 of 1 CPU busy (CPU 1), but 1 rank needs them too"
    assert reason.hosts == ("node0",)


def test_ranks_that_did_not_look_count_where_all_have_the_same_processors():
    seen = bench_of("node0", "node0", "node0")
    one = machine(ranks=(0,), cpus=((0, 1, 2),), load=load({0: 1.0}))
    assert texts(processor_reasons, seen, one) == []  # of one rank that is known to be here
    three = machine(ranks=(0, 1, 2), cpus=((0, 1, 2),), load=load({0: 1.0}))
    assert len(texts(processor_reasons, seen, three)) == 1


@pytest.mark.parametrize(
    ("one", "effect"),
    [
        (governor(), "LIMIT"),
        (governor(driver=""), "LIMIT"),
        (governor("performance"), None),
        (governor("schedutil"), None),
        (governor(driver="intel_pstate", preference="balance_performance"), None),
        (governor(driver="amd-pstate-epp", preference="power"), "SMALL"),
        (governor("performance", driver="intel_pstate", preference="performance"), None),
    ],
)
def test_governors(one, effect):
    seen = machine(load=load(governors=[one]))
    assert [name for name, _ in reported(processor_reasons, bench_of(*TWO), seen)] == (
        [] if effect is None else [effect]
    )


@pytest.mark.parametrize(("steal", "count"), [(None, 0), (0.0, 0), (0.04, 0), (0.12, 1)])
def test_stolen_time(steal, count):
    assert len(texts(processor_reasons, bench_of(*TWO), machine(load=load(steal=steal)))) == count


# Interfaces


def card(name="eth0", address="10.0.0.4/24", speed=None, **changes):
    return replace(interface(name, address, **changes), speed_mb_s=speed)


def gloo_hosts(*cards, own="10.0.0.4"):
    """Two hosts, of which the first has these interfaces and the second a fast one."""
    first = machine(ranks=(0,), network=network(*cards), names=names(own))
    second = machine("node1", ranks=(1,), network=network(card(speed=400_000, mtu=9000)), names=names("10.0.0.4"))
    return first, second


def test_gloo_on_one_host_is_no_figure_of_a_network():
    one = machine(network=network(card(speed=1000)), names=names("10.0.0.4"))
    ((effect, reason),) = reported(network_reasons, bench_of(*TWO, results=[3.0]), one)
    assert effect == "CONTEXT"
    assert "over eth0, whose address 10.0.0.4 is this host's own" in reason.text


def test_gloo_on_loopback():
    one = machine(network=network(), names=names("127.0.1.1"))
    ((_, reason),) = reported(network_reasons, bench_of(*TWO), one)
    assert "sends data through the kernel over lo, so this measures CPUs and memory" in reason.text


def test_one_rank_sends_nothing():
    one = machine(ranks=(0,), network=network(card(speed=1000)), names=names("10.0.0.4"))
    assert texts(network_reasons, bench_of("node0"), one) == []


@pytest.mark.parametrize(
    ("speed", "results", "expected"),
    [
        (1000, [], "a host can send at most 0.125 GB/s"),
        (1000, [0.117], "a host can send at most 0.125 GB/s, and 0.117 GB/s were measured"),
        (10_000, [1.1], "a host can send at most 1.25 GB/s, and 1.1 GB/s were measured"),
        (10_000, [0.4], None),  # something else limits
        (10_000, [], None),
        (100_000, [1.5], None),
        (None, [0.1], None),  # nobody knows its speed
    ],
)
def test_a_slow_interface(speed, results, expected):
    seen = bench_of(*APART, results=results)
    found = texts(network_reasons, seen, *gloo_hosts(card(speed=speed, mtu=9000)))
    if expected is None:
        assert found == []
    else:
        (text,) = found
        assert text == f"LIMIT Gloo uses eth0, {speed / 1000:g} Gbit/s: {expected}"


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"virtual": True}, 0),  # a pod's veth, which says 10 Gbit/s whatever is below it
        ({"virtual": True, "name": "bond0"}, 1),
        ({"virtual": True, "name": "eth0.526"}, 1),
    ],
)
def test_a_speed_that_means_something(changes, count):
    seen = bench_of(*APART, results=[1.2])
    assert len(texts(network_reasons, seen, *gloo_hosts(card(speed=10_000, mtu=9000, **changes)))) == count


def test_a_faster_interface_that_is_not_taken():
    hosts = gloo_hosts(
        card(speed=10_000, mtu=9000), card("ib0", "10.1.0.4/24", speed=400_000), card("eth9", "10.2.0.4/24", speed=1000)
    )
    ((effect, reason),) = reported(network_reasons, bench_of(*APART, results=[0.3]), *hosts)
    assert (effect, reason.fix) == ("LIMIT", "export GLOO_SOCKET_IFNAME=ib0 on all hosts")
    assert reason.text.endswith("; ib0 has 400 Gbit/s")
    assert reason.hosts == ("node0",)


@pytest.mark.parametrize("other", [{"up": False}, {"name": "docker0"}, {"name": "wg0"}])
def test_an_interface_that_cannot_be_taken_is_no_advice(other):
    faster = card(**{"name": "eth1", "address": "10.1.0.4/24", "speed": 400_000, **other})
    assert (
        texts(network_reasons, bench_of(*APART, results=[0.3]), *gloo_hosts(card(speed=10_000, mtu=9000), faster)) == []
    )


def test_a_vpn():
    hosts = gloo_hosts(card("tailscale0", virtual=True), card("eth0", "10.9.0.4/24"))
    ((effect, reason),) = reported(network_reasons, bench_of(*APART), *hosts)
    assert (effect, reason.fix) == ("OTHER_WAY", "export GLOO_SOCKET_IFNAME=eth0 on all hosts")


@pytest.mark.parametrize(
    ("speed", "mtu", "count"), [(25_000, 1500, 1), (25_000, 9000, 0), (1000, 1500, 0), (None, 1500, 0)]
)
def test_small_packets(speed, mtu, count):
    found = texts(network_reasons, bench_of(*APART, results=[0.01]), *gloo_hosts(card(speed=speed, mtu=mtu)))
    assert len([text for text in found if text.startswith("SMALL")]) == count


def nccl_hosts(*cards, devices=(), **logged):
    logs = [log(0, **logged), log(1, **logged)]
    nodes = [
        machine(
            host,
            ranks=(rank,),
            network=network(*cards),
            names=names("10.0.0.4"),
            rdma=rdma(*devices) if devices else NO_RDMA,
        )
        for rank, host in enumerate(APART)
    ]
    return bench_of(*APART, backend="nccl", logs=logs, results=[0.11]), nodes


def test_nccl_over_tcp_is_held_to_its_interfaces():
    cards = card(speed=1000), card("eth1", "10.1.0.4/24", speed=100)
    seen, nodes = nccl_hosts(*cards, network="Socket", interfaces=("eth0",), NET_Socket=2)
    assert [text.partition(":")[0] for text in texts(network_reasons, seen, *nodes)] == [
        "LIMIT NCCL uses eth0, 1 Gbit/s"
    ] * 2


def test_nccl_over_rdma_is_not():
    seen, nodes = nccl_hosts(card(speed=1000), devices=[hca()], NET_IB_GDRDMA=2)
    assert texts(network_reasons, seen, *nodes) == []


@pytest.mark.parametrize(
    ("mtu", "size"), [(1500, 1024), (2143, 1024), (2200, 2048), (4191, 2048), (4192, None), (9000, None)]
)
def test_packets_of_roce(mtu, size):
    devices = [hca(number, link_layer="Ethernet", netdevs=("rdma0",)) for number in range(2)]
    seen, nodes = nccl_hosts(card("rdma0", mtu=mtu), devices=devices, NET_IB_GDRDMA=2)
    found = texts(network_reasons, seen, *nodes)
    expected = [] if size is None else [f"SMALL RoCE sends {size}-byte packets over 2 ports"] * 2
    assert [text.partition(",")[0] for text in found] == expected


# NCCL's log


def nccl(*hosts, gpus=None, logs=(), devices=(), **settings):
    """A bench over NCCL and its machines, 8 H100 on NVSwitches each."""
    seen = bench_of(*hosts, backend="nccl", logs=logs, **settings)
    nodes = [
        machine(
            host,
            ranks=tuple(rank for rank, other in enumerate(hosts) if other == host),
            gpus=gpus_of() if gpus is None else gpus,
            rdma=rdma(*devices) if devices else NO_RDMA,
        )
        for host in dict.fromkeys(hosts)
    ]
    return texts(nccl_reasons, seen, *nodes)


def test_sockets_although_rdma_is_up():
    logs = [log(rank, "Socket", ("eth0",), NET_Socket=4) for rank in range(2)]
    assert (
        nccl(*APART, logs=logs, devices=[hca()])
        == ["OTHER_WAY NCCL uses TCP to other hosts (eth0), although RDMA is up on mlx5_0 (400 Gb/sec (4X NDR))"] * 2
    )


def test_sockets_where_there_is_nothing_else():
    logs = [log(rank, "Socket", ("eth0",), NET_Socket=4) for rank in range(2)]
    assert nccl(*APART, logs=logs) == ["LIMIT NCCL uses TCP to other hosts (eth0): no RDMA network is up here"] * 2


@pytest.mark.parametrize(
    ("hosts", "logs"),
    [
        (TWO, [log(0, "Socket", ("eth0",), P2P_CUMEM=8)]),  # one host sends nothing over it
        (APART, [log(0, "IB", NET_IB_GDRDMA=8)]),
        (APART, [log(0, "AWS Libfabric", (), **{"NET_AWS Libfabric_GDRDMA": 8})]),
        (APART, []),
    ],
)
def test_no_sockets(hosts, logs):
    assert nccl(*hosts, logs=logs, devices=[hca()]) == []


def test_no_gpudirect_rdma():
    found = nccl(*APART, logs=[log(0, NET_IB=4), log(1, NET_IB_GDRDMA=4)])
    assert found == ["LIMIT NCCL does not use GPUDirect RDMA to other hosts (NET/IB): data goes through host memory"]


def test_no_gpudirect_rdma_with_cards_that_have_none():
    geforce = all_named(gpus_of(), "NVIDIA GeForce RTX 4090")
    assert nccl(*APART, logs=[log(0, NET_IB=4)], gpus=geforce) == []


def test_host_memory_although_nvlink_joins_the_gpus():
    found = nccl(*TWO, logs=[log(0, SHM=4), log(1, SHM=4)])
    assert found == ["OTHER_WAY NCCL uses host memory (SHM) between GPUs of this host, although they have NVLink"]


def test_one_rank_that_goes_through_host_memory_is_named():
    (found,) = nccl(*TWO, logs=[log(0, P2P_CUMEM=4), log(1, SHM=4)])
    assert found.startswith("OTHER_WAY rank 1: NCCL uses host memory")


def test_host_memory_without_nvlink():
    (found,) = nccl(*TWO, logs=[log(0, SHM=4)], gpus=gpus_of(machine="workstation2"))
    assert found.startswith("LIMIT rank 0: NCCL uses host memory")


@pytest.mark.parametrize(
    ("hosts", "nvls", "name", "settings", "count"),
    [
        (("node0",) * 4, False, None, {}, 1),
        (("node0",) * 4, True, None, {}, 0),
        (("node0",) * 4, None, None, {}, 0),  # NCCL did not look for it
        (TWO, False, None, {}, 0),  # two GPUs never use it
        (("node0",) * 4, False, "NVIDIA A100-SXM4-80GB", {}, 0),
        (("node0",) * 4, False, "NVIDIA H100 PCIe", {}, 0),
        (("node0",) * 4, False, None, {"collectives": (Collective.ALL_TO_ALL,)}, 0),
    ],
)
def test_nvlink_sharp(hosts, nvls, name, settings, count):
    gpus = gpus_of() if name is None else all_named(gpus_of(), name)
    logs = [log(rank, nvls=nvls, P2P_CUMEM=4) for rank in range(len(hosts))]
    assert len(nccl(*hosts, logs=logs, gpus=gpus, **settings)) == count


def test_a_gloo_bench_asks_nothing_of_nccl():
    seen = bench_of(*TWO, logs=[log(0, "Socket", SHM=2)])
    assert texts(nccl_reasons, seen, machine(gpus=gpus_of())) == []


# Variables


def left_set(hosts, backend="nccl", devices=(), conf_files=(), **variables):
    nodes = [
        machine(
            host,
            ranks=tuple(rank for rank, other in enumerate(hosts) if other == host),
            variables=variables,
            rdma=rdma(*devices) if devices else NO_RDMA,
            conf_files=conf_files,
        )
        for host in dict.fromkeys(hosts)
    ]
    found = list(variable_reasons(view(bench_of(*hosts, backend=backend), fleet(*nodes))))
    effects = {one.reason.text: one.effect.name for one in found}
    return [(effects[reason.text], reason) for reason in order(found)]


@pytest.mark.parametrize(
    ("hosts", "variables", "effects"),
    [
        (TWO, {}, []),
        (TWO, {"NCCL_P2P_DISABLE": "1"}, ["OTHER_WAY"]),
        (TWO, {"NCCL_P2P_DISABLE": "0"}, []),
        (TWO, {"NCCL_P2P_LEVEL": "LOC"}, ["OTHER_WAY"]),
        (TWO, {"NCCL_P2P_LEVEL": "NVL"}, []),
        (APART, {"NCCL_P2P_DISABLE": "1"}, []),  # one GPU a host
        (TWO, {"NCCL_SHM_DISABLE": "1"}, ["OTHER_WAY"]),
        (TWO, {"NCCL_ALGO": "Tree"}, ["LIMIT"]),
        (TWO, {"NCCL_ALGO": "^NVLS"}, []),
        (TWO, {"NCCL_PROTO": "LL"}, ["LIMIT"]),
        (TWO, {"NCCL_NVLS_ENABLE": "0"}, ["SMALL"]),
        (TWO, {"NCCL_NET_GDR_LEVEL": "LOC"}, []),  # one host
        (APART, {"NCCL_NET_GDR_LEVEL": "LOC"}, ["LIMIT"]),
        (TWO, {"NCCL_MAX_NCHANNELS": "2"}, ["LIMIT"]),
        (TWO, {"NCCL_MAX_NCHANNELS": "32"}, []),
        (TWO, {"NCCL_BUFFSIZE": "4M"}, ["LIMIT"]),
        (TWO, {"NCCL_BUFFSIZE": "4194304"}, []),
        (TWO, {"NCCL_COMM_ID": "10.0.0.4:29600"}, []),  # a danger, and none to the bandwidth
        (TWO, {"TORCH_FR_BUFFER_SIZE": "0"}, []),
        (TWO, {"CUDA_LAUNCH_BLOCKING": "1"}, ["SMALL"]),
    ],
)
def test_variables_left_set(hosts, variables, effects):
    assert [effect for effect, _ in left_set(hosts, **variables)] == effects


@pytest.mark.parametrize(
    ("variables", "effects"),
    [({"NCCL_P2P_DISABLE": "1", "NCCL_MAX_NCHANNELS": "1"}, []), ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, ["LIMIT"])],
)
def test_what_bears_on_gloo(variables, effects):
    assert [effect for effect, _ in left_set(TWO, backend="gloo", **variables)] == effects


def test_the_words_of_a_variable():
    ((_, reason),) = left_set(TWO, NCCL_P2P_DISABLE="1")
    assert reason.text.startswith("NCCL_P2P_DISABLE=1: GPUs of one node reach each other through host memory")
    assert (reason.source, reason.fix, reason.ranks) == ("DD114 env-danger", "unset NCCL_P2P_DISABLE", (0, 1))


def conf(**variables):
    return ConfFile(path="/etc/nccl.conf", variables=variables, hidden_by_env=(), hidden_by_file=(), bad_lines=())


def test_a_variable_of_a_file():
    ((effect, reason),) = left_set(TWO, conf_files=(conf(NCCL_P2P_DISABLE="1"),))
    assert (effect, reason.source) == ("OTHER_WAY", "DD115 nccl-conf (/etc/nccl.conf)")
    assert reason.fix == "remove NCCL_P2P_DISABLE from /etc/nccl.conf"


@pytest.mark.parametrize(("devices", "count"), [([hca()], 1), ([hca(state="DOWN/Disabled")], 0), ([], 0)])
def test_rdma_that_a_file_switches_off(devices, count):
    found = left_set(APART, devices=devices, conf_files=(conf(NCCL_IB_DISABLE="1"),))
    assert [effect for effect, _ in found] == ["OTHER_WAY"] * count
