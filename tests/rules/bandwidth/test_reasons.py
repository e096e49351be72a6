"""What could explain a low number: processors, interfaces, NCCL's ways, variables."""

from dataclasses import replace

from ddpdoctor.model.bandwidth import Reason
from ddpdoctor.model.node import ConfFile
from ddpdoctor.report.lines import format_ranks
from ddpdoctor.rules.bandwidth import reasons as rules
from ddpdoctor.rules.bandwidth.reasons import (
    nccl_reasons,
    network_reasons,
    order,
    processor_reasons,
    variable_reasons,
    view,
)
from tests.golden import table
from tests.rules.bandwidth import build
from tests.rules.bandwidth.build import bench_of, log, machine, reported
from tests.rules.environment import build as machines
from tests.rules.environment.build import NO_RDMA, fleet, gpus_of, interface, names, network, rdma

TWO = ("node0", "node0")
APART = ("node0", "node1")


def texts(question, seen, *nodes):
    return worded(reported(question, seen, *nodes))


def worded(found):
    """Return reasons as lines: their effect, whom they concern, the source and the fix."""
    lines = []
    for effect, one in found:
        who = ", ".join(filter(None, [format_ranks(one.ranks), *one.hosts]))
        lines.append(f"{effect} {one.text} ({who}) [{one.source}]" + (f" fix: {one.fix}" if one.fix else ""))
    return "\n".join(lines) or "nothing"


def processors(seen, *nodes):
    return texts(processor_reasons, seen, *nodes)


def networks(seen, *nodes):
    return texts(network_reasons, seen, *nodes)


def weighed(effect, text, host, ranks=()):
    return effect, Reason(text=text, source="s", hosts=(host,), ranks=ranks)


# Order


def test_a_bench_without_machines_has_no_reasons():
    seen = view(bench_of(*TWO, backend="nccl", logs=[log(0, "Socket", SHM=2)]), None)
    assert [*processor_reasons(seen), *network_reasons(seen), *nccl_reasons(seen), *variable_reasons(seen)] == []


def test_a_machine_that_was_read_without_a_launcher_is_the_one_that_all_ranks_are_on():
    seen = view(bench_of("node0"), fleet(machine(ranks=(None,))))
    assert [place.ranks for place in seen.places] == [(0,)]


def test_machines_without_a_rank_of_the_bench_are_left_out():
    seen = view(bench_of("node0"), fleet(machine(ranks=(0,)), machine("node1", ranks=(7,))))
    assert [place.node.host for place in seen.places] == ["node0"]


# Interfaces


def card(name="eth0", address="10.0.0.4/24", speed=None, **changes):
    return replace(interface(name, address, **changes), speed_mb_s=speed)


def gloo_hosts(*cards, own="10.0.0.4"):
    """Two hosts, of which the first has these interfaces and the second a fast one."""
    first = machine(ranks=(0,), network=network(*cards), names=names(own))
    second = machine("node1", ranks=(1,), network=network(card(speed=400_000, mtu=9000)), names=names("10.0.0.4"))
    return first, second


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


def over_nccl(*cards, **more):
    seen, nodes = nccl_hosts(*cards, **more)
    return networks(seen, *nodes)


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
    effects = {reason.text: effect.name for effect, reason in found}
    return worded((effects[reason.text], reason) for reason in order(found))


def conf(**variables):
    return ConfFile(path="/etc/nccl.conf", variables=variables, hidden_by_env=(), hidden_by_file=(), bad_lines=())


test_rows = table("reasons", vars(rules), vars(machines), vars(build), globals())
