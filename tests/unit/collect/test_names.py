import socket
import threading

import pytest

from ddpdoctor.collect.network import master_name, read_names
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.system import System, SystemCalls
from tests.machines import load_machine

PLAN = ReadingPlan(sections=frozenset({"names"}))


def test_an_infiniband_node(tmp_path):
    names = read_names(load_machine("nvlink8", tmp_path), PLAN)
    assert (names.hostname, names.fqdn) == ("dgx01", "dgx01.cluster.example")
    assert (names.own.addresses, names.own.error, names.own.timed_out) == (("10.0.0.11",), None, False)
    assert (names.master, names.head) == (None, None)
    assert names.reverse_s is not None


def test_a_desktop_has_the_name_that_ubuntu_gives_it(tmp_path):
    names = read_names(load_machine("workstation2", tmp_path), PLAN)
    assert names.own.addresses == ("127.0.1.1",)
    assert names.reverse_s < 1


def test_the_master_and_the_head_are_looked_up(tmp_path):
    system = load_machine("nvlink8", tmp_path, env={"MASTER_ADDR": "dgx07", "MASTER_PORT": "29500"})
    names = read_names(system, ReadingPlan(sections=frozenset({"names"}), head="dgx01"))
    assert (names.master.name, names.master.addresses) == ("dgx07", ())
    assert names.master.error == "not recorded: resolve dgx07"
    assert names.head.addresses == ("10.0.0.11",)


@pytest.mark.parametrize(
    ("env", "master"),
    [
        ({}, None),
        ({"MASTER_ADDR": " node0 "}, "node0"),
        ({"MASTER_ADDR": "node0", "PET_RDZV_ENDPOINT": "node1:29400"}, "node0"),
        ({"PET_RDZV_ENDPOINT": "node1:29400"}, "node1"),
        ({"PET_RDZV_ENDPOINT": "[fd00::1]:29400"}, "fd00::1"),
        ({"PET_RDZV_ENDPOINT": ""}, None),
        ({"PET_MASTER_ADDR": "node2"}, "node2"),
    ],
)
def test_where_the_ranks_meet(env, master):
    assert master_name(env) == master


@pytest.mark.parametrize(
    ("endpoint", "host"), [("a", "a"), ("a:1", "a"), ("[::1]:1", "::1"), ("fd00::2", "fd00::2"), ("", None)]
)
def test_host_of_an_endpoint(endpoint, host):
    assert master_name({"PET_RDZV_ENDPOINT": endpoint}) == host


class DeadServer(SystemCalls):
    """Calls of which none answers that would ask a name server."""

    def __init__(self):
        self.never = threading.Event()

    def resolve(self, name):  # noqa: ARG002 - the protocol's
        self.never.wait()
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    def reverse(self, address):
        return self.resolve(address)[0]

    def fqdn(self):
        return self.resolve("")[0]


def test_a_dead_name_server_costs_two_seconds_once():
    calls = DeadServer()
    names = read_names(System(env={"MASTER_ADDR": "node0"}, calls=calls), PLAN)
    assert (names.own.timed_out, names.own.error, names.fqdn) == (True, "no answer within 2 s", None)
    assert names.master.timed_out
    calls.never.set()


def test_this_machine():
    names = read_names(System(), PLAN)
    assert names.hostname == socket.gethostname()
    assert bool(names.own.addresses) is (names.own.error is None)
