"""A collective that all ranks are in and that does not end: what is to be checked, and what the machine shows."""

from dataclasses import replace

from ddpdoctor.model.facts import Blocked, Connection, Connections, GroupState, ProcessCauses
from ddpdoctor.model.node import ConfFile, FirewallChain
from ddpdoctor.rules.network import choose, find_setting
from tests.golden import table
from tests.rules import build
from tests.rules.build import C10D, in_call, job, line, phase, rank, sample, stack
from tests.rules.environment.build import interface, names, network, node, process

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


def on_machine(seen, **variables):
    """A job on one host of which this is the network, with these variables."""
    machine = node(processes=(process(**variables),), network=seen)
    ranks = (connected(in_call(0, world=2), "10.0.0.4:4000"), connected(in_call(1, world=2), "10.0.0.4:5000"))
    return on_one_host("gloo", *ranks, machine=machine)


# Ranks that connect to a store which nobody serves are to blame, at the line that gave its address.


ELSEWHERE = Connections(listening=("[::]:29500", "0.0.0.0:22"))
SLEEPS = Blocked(call="clock_nanosleep")


def connecting(number, store, connections=ELSEWHERE, blocked=SLEEPS, world=2, **more):
    causes = ProcessCauses(store=replace(store, rank=number), connections=connections, blocked=blocked, **more)
    return rank(
        number, world, initialized=False, open_calls=(phase("init_process_group", 6),), causes=causes,
        samples=(sample(stack(line(6), C10D)),),
    )  # fmt: skip


def in_init(number, world=2):
    return rank(number, world, initialized=False, open_calls=(phase("init_process_group", 6),))


ETH0 = interface("eth0", "10.0.0.4/24", "fd00::4/64")
ETH1 = interface("eth1", "10.1.0.4/24")
IB0 = interface("ib0", "10.2.0.4/24")
DOCKER0 = interface("docker0", "172.17.0.1/16", virtual=True)
VIRBR0 = interface("virbr0", "192.168.122.1/24", virtual=True)
V6_ONLY = interface("eth0", "fd00::4/64")
DOWN = interface("eth0", "10.0.0.4/24", up=False)


def chosen(*interfaces, own=("10.0.0.4",), **variables):
    net = network(*interfaces)
    facts = node(names=names(*own), network=net, conf_files=(), processes=(process(**variables),))
    return choose(facts, net)


# Lines that open a packet filter: they are to be pasted, so they fit the addresses and the filter of the host.


V4, V6 = "10.0.0.11", "fd00:77::b"


def machine(*chains):
    refusing = tuple(FirewallChain(name=name, refusal="policy drop", accepts=()) for name in chains)
    return node("node0", network=network(interface("eth0", "10.0.0.10/24", "fd00:77::a/64"), firewall=refusing))


NAME = "NCCL_IB_HCA"


def conf(value, *, path="/etc/nccl.conf", by_env=(), by_file=()):
    return ConfFile(path=path, variables={NAME: value}, hidden_by_env=by_env, hidden_by_file=by_file, bad_lines=())


def find(*files, **variables):
    one = process(**variables)
    return find_setting(node(processes=(one,), conf_files=files), one, NAME)


SECOND = conf("mlx5_2", path="/root/.nccl.conf")


FACTS = "ddpdoctor.diagnose.job ddpdoctor.model.facts ddpdoctor.rules.network"
test_rows = table("transport", FACTS, vars(build), globals(), head=build.sureness)
