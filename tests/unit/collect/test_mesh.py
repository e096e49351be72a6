"""Istio's proxy is seen by the sockets that it listens on, from any container of the pod."""

import socket

import pytest

from ddpdoctor.collect.network import has_mesh_proxy
from ddpdoctor.collect.system import System
from tests.machines import load_machine


@pytest.mark.parametrize(("states", "seen"), [((), False), (("istio",), True)])
def test_recorded(tmp_path, states, seen):
    assert has_mesh_proxy(load_machine("k8s-pod", tmp_path, *states)) is seen


def test_one_port_alone_is_somebody_else(tmp_path):
    system = load_machine("k8s-pod", tmp_path, "istio")
    table = system.path("/proc/net/tcp")
    table.write_text("\n".join(table.read_text().splitlines()[:2]))
    assert not has_mesh_proxy(system)


def test_no_proc(tmp_path):
    assert not has_mesh_proxy(System(root=tmp_path))


def test_sockets_of_ipv6_count(tmp_path):
    system = load_machine("k8s-pod", tmp_path, "istio")
    table = system.path("/proc/net/tcp")
    table.rename(table.with_name("tcp6"))
    assert has_mesh_proxy(system)


def test_real_sockets():
    assert not has_mesh_proxy(System())
    with socket.create_server(("127.0.0.1", 15001)), socket.create_server(("127.0.0.1", 15006)):
        assert has_mesh_proxy(System())
