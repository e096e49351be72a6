"""Reasons for a low bandwidth on recorded machines: healthy ones give none, and every fault that bears on it one."""

from dataclasses import replace
from functools import cache

import pytest

from ddpdoctor.collect.gpus import read_gpu_facts
from ddpdoctor.collect.launch import read_process
from ddpdoctor.collect.system import COLLECTORS, SECTIONS_FOR_BENCH, ReadingPlan, read_node
from ddpdoctor.diagnose.bandwidth import CHECKS, find_reasons, reason_rules
from ddpdoctor.diagnose.machines import sections_of
from ddpdoctor.model.node import Fleet, Limits
from ddpdoctor.model.reading import Unread
from tests.machines import load_machine, shared_machine
from tests.nvml import load_nvml
from tests.rules.bandwidth.build import bench_of as bench_made
from tests.rules.bandwidth.build import load, log, member

WITH_GPUS = frozenset({"nvlink8", "roce8", "workstation2"})
PLAN = ReadingPlan(sections=SECTIONS_FOR_BENCH, use_torch=False)


@cache
def read(machine, states):
    """Return the machine as the bench reads it, without GPUs."""
    system = shared_machine(machine, *states)
    return system, read_node(system, PLAN, (read_process(system, rank=0, local_rank=0),))


@cache
def gpus_of(machine, states):
    *_, gpus = read_gpu_facts(load_nvml(machine, *states), read(machine, ())[0])
    return gpus


def node_of(machine, *, host="host0", ranks=range(8), states=(), nvml=(), **variables):
    """Return a node on which these ranks run with these variables, each with all processors."""
    node = read(machine, tuple(states))[1]
    if machine in WITH_GPUS:
        node = replace(node, gpus=gpus_of(machine, tuple(nvml)))
    processes = tuple(
        replace(node.first, rank=rank, local_rank=rank - ranks[0], pid=100 + rank, variables=variables)
        for rank in ranks
    )
    return replace(node, host=host, processes=processes)


def bench_of(*nodes, backend="nccl", logs=(), **settings):
    seen = bench_made(backend=backend, logs=logs, **settings)
    return replace(seen, members=tuple(member(rank, node.host) for node in nodes for rank in node.ranks))


def sources(*nodes, **asked):
    return [reason.source for reason in find_reasons(bench_of(*nodes, **asked), Fleet(nodes=nodes))]


def pair(machine, *, healthy=None, **state):
    """Return two hosts, of which the first is in a state."""
    return node_of(machine, **state), node_of(healthy or machine, host="host1", ranks=range(8, 16))


# Healthy machines


@pytest.mark.parametrize("machine", ["nvlink8", "roce8"])
def test_a_healthy_machine_has_no_reasons(machine):
    node = node_of(machine)
    logs = [log(rank, nvls=True, P2P_CUMEM=48) for rank in range(8)]
    assert sources(node, logs=logs) == []


@pytest.mark.parametrize("machine", ["nvlink8", "roce8"])
def test_two_healthy_machines_have_no_reasons(machine):
    nodes = pair(machine)
    logs = [log(rank, nvls=True, P2P_CUMEM=48, NET_IB_GDRDMA=4) for rank in range(16)]
    assert sources(*nodes, logs=logs) == []


def test_a_desktop_whose_cards_have_no_peer_access():
    node = node_of("workstation2", ranks=range(2))
    logs = [log(rank, "Socket", ("enp10s0",), SHM=4) for rank in range(2)]
    assert sources(node, logs=logs) == ["DD323 p2p", "NCCL's log"]


def test_gloo_on_one_host_is_named_as_what_it_is():
    node = node_of("container-nogpu", ranks=range(2))
    (reason,) = find_reasons(bench_of(node, backend="gloo"), Fleet(nodes=(node,)))
    assert "not a network" in reason.text


def test_gloo_asks_nothing_of_gpus_and_rdma():
    node = node_of("nvlink8", states=("ib-down", "pcie-narrow", "acs"), nvml=("nvlink-down", "hw-slowdown"))
    assert sources(node, backend="gloo") == ["GLOO_SOCKET_IFNAME, the host name's address"]


def test_gloo_between_hosts_takes_the_host_names_interface_though_there_are_faster_ones():
    (reason,) = [
        reason
        for reason in find_reasons(bench_of(*pair("nvlink8"), backend="gloo"), Fleet(nodes=pair("nvlink8")))
        if reason.source == "/sys/class/net/*/speed"
    ]
    assert reason.text == ("Gloo uses eno1, 10 Gbit/s: a host can send at most 1.25 GB/s; ib0 has 400 Gbit/s")
    assert (reason.hosts, reason.fix) == (("host0", "host1"), "export GLOO_SOCKET_IFNAME=ib0 on all hosts")


def test_without_machines_there_is_nothing_to_say():
    assert find_reasons(bench_of(node_of("nvlink8")), None) == ()


# Faults


@pytest.mark.parametrize(
    ("state", "source"),
    [
        ("ib-down", "DD331 ib-state"),
        ("ib-one-lane", "DD332 ib-rate"),
        ("ib-flapped", "DD333 ib-flap"),
        ("no-peermem", "DD336 peermem"),
        ("uverbs-denied", "DD338 uverbs"),
        ("pcie-narrow", "DD320 pcie"),
        ("pcie-old-speed", "DD320 pcie"),
        ("acs", "DD324 acs-iommu"),
        ("iommu", "DD324 acs-iommu"),
        ("numa-lost", "DD325 numa"),
    ],
)
def test_a_fault_between_hosts_and_not_inside_one(state, source):
    assert sources(*pair("nvlink8", states=(state,))) == [source]
    assert sources(node_of("nvlink8", states=(state,))) == []


@pytest.mark.parametrize(
    ("nvml", "source"),
    [
        ("nvlink-down", "DD321 nvlink"),
        ("p2p-off", "DD323 p2p"),
        ("hw-slowdown", "DD312 throttle"),
        ("leftover", "DD318 other-procs"),
        ("app-clocks", "DD314 app-clocks"),
    ],
)
def test_a_fault_of_gpus(nvml, source):
    assert sources(node_of("nvlink8", nvml=(nvml,))) == [source]


@pytest.mark.parametrize("nvml", ["power-cap", "ecc-off", "power-limit", "persistence-off", "remapped"])
def test_what_a_collective_does_not_feel(nvml):
    assert sources(node_of("nvlink8", nvml=(nvml,))) == []


def test_a_link_between_gpus_is_nothing_to_hosts_with_one_rank_each():
    nodes = (node_of("nvlink8", ranks=range(1), nvml=("nvlink-down",)), node_of("nvlink8", host="b", ranks=range(1, 2)))
    assert sources(*nodes) == []


def test_pcie_counts_inside_a_host_where_nvlink_is_not_used():
    narrow = node_of("nvlink8", states=("pcie-narrow",))
    assert sources(narrow, logs=[log(0, SHM=4)]) == ["NCCL's log", "DD320 pcie"]


@pytest.mark.parametrize(
    ("variables", "hosts", "source"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, 1, "DD114 env-danger"),
        ({"NCCL_IB_DISABLE": "1"}, 2, "DD339 ib-disabled"),
        ({"NCCL_NET": "Socket"}, 2, "DD339 ib-disabled"),
        ({"NCCL_IB_HCA": "mlx4"}, 2, "DD335 ib-hca-env"),
    ],
)
def test_a_variable_left_set(variables, hosts, source):
    nodes = pair("nvlink8", **variables)[:hosts]
    assert sources(*nodes) == [source]


def test_a_variable_that_bears_on_other_hosts_only():
    assert sources(node_of("nvlink8", NCCL_IB_DISABLE="1")) == []


def test_what_explains_most_comes_first():
    node = node_of("nvlink8", nvml=("leftover", "p2p-off"), NCCL_MAX_NCHANNELS="2")
    assert sources(node, logs=[log(0, SHM=2)]) == [
        "NCCL's log",
        "DD323 p2p",
        "DD114 env-danger",
        "DD318 other-procs",
    ]


def test_too_few_processors_and_others_on_them():
    node = node_of("container-nogpu", ranks=range(2))
    processes = tuple(replace(process, cpus=(0,)) for process in node.processes)
    node = replace(node, processes=processes, load=load({0: 0.9}))
    assert sources(node, backend="gloo") == [
        "sched_getaffinity",
        "/proc/stat, while the ranks were idle",
        "GLOO_SOCKET_IFNAME, the host name's address",
    ]


def test_a_reason_says_what_was_seen_and_what_to_do():
    (reason,) = find_reasons(
        bench_of(node_of("nvlink8", nvml=("nvlink-down",))),
        Fleet(nodes=(node_of("nvlink8", nvml=("nvlink-down",)),)),
    )
    assert "down" in reason.text
    assert "nvidia-smi nvlink -s" in reason.fix
    assert reason.hosts == ("host0",)


# What is read


def test_the_bench_reads_what_its_reasons_need_and_starts_no_child_that_imports_torch():
    needed = sections_of(reason_rules()) - {"torch", "gpu_trial"}
    assert needed <= SECTIONS_FOR_BENCH <= COLLECTORS.keys()
    assert not SECTIONS_FOR_BENCH & {"torch", "gpu_trial", "clock", "kernel_log", "stuck_processes"}
    assert {rule.kind for rule in reason_rules()} == CHECKS.keys()


def test_what_is_read_by_itself_comes_last(tmp_path):
    (tmp_path / "proc").mkdir()
    system = load_machine("container-nogpu", tmp_path / "root")
    node = read_node(system, PLAN, (read_process(system),))

    assert isinstance(node.limits, Limits)
    assert isinstance(node.load, Unread)
    assert node.load.reason == "this system does not report how busy its processors are"
