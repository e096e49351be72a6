"""The checks on names, interfaces and ports, on hosts with a network, /etc/hosts and packet filter of their own."""

import json
import os
import subprocess
import sys

import pytest

from tests.scenarios.check_env.running import CHECK_ENV, check_env, environment, read
from tests.scenarios.hosts import lent_hosts, require
from tests.scenarios.running import free_port

pytestmark = pytest.mark.usefixtures("preloaded_python")

CHECKS = (
    "hostname-loopback", "hostname-unresolvable", "hostname-not-local", "fqdn-forward", "master-resolve", "rdns-slow",
    "ifname-exists", "iface-up", "iface-agree", "v4v6", "mtu", "port-free", "firewall-local",
)  # fmt: skip
ALL = (*CHECK_ENV, *CHECKS, "--no-torch")
SEVERAL = {"PET_NNODES": "2"}
DEAD_SERVER = "nameserver 203.0.113.53\n"
"""An address for documentation: packets to it are lost without a word."""


def check_on(hosts, *options, number=0, **variables):
    return read(hosts.start(number, *ALL, *options, env=environment(**variables)))


def check_all(hosts, **variables):
    """Start the command on every host, as a person would, and return the first one's report."""
    meet = ("--nnodes", str(hosts.count), "--master-addr", hosts.address(0), "--master-port", str(free_port()))
    started = [
        hosts.start(number, *ALL, *meet, "--node-rank", str(number), env=environment(**variables))
        for number in range(hosts.count)
    ]
    seen, *_ = [read(process) if not number else process.communicate() for number, process in enumerate(started)]
    return seen


def test_a_healthy_host():
    with lent_hosts(1) as hosts:
        seen = check_on(hosts)
    assert seen.findings == []
    eth0 = f"eth0 ({hosts.address(0)})"
    assert seen.checks["iface-up"]["seen"] == f"Gloo would use {eth0}, NCCL {eth0}"


def test_a_name_that_nobody_knows():
    with lent_hosts(1) as hosts:
        hosts.write(0, "hosts", "127.0.0.1 localhost\n")
        finding = check_on(hosts).found["hostname-unresolvable"]
    assert finding["severity"] == "error"
    assert "does not resolve" in finding["summary"]


def test_a_dead_name_server_is_cut_off_and_the_rest_is_reported():
    with lent_hosts(1) as hosts:
        hosts.write(0, "hosts", "127.0.0.1 localhost\n")
        hosts.write(0, "resolv.conf", DEAD_SERVER)
        seen = check_on(hosts, MASTER_ADDR="head.example")
    kinds = seen.found
    assert set(kinds) == {"hostname-unresolvable", "master-resolve", "rdns-slow"}
    for kind in ("hostname-unresolvable", "master-resolve"):
        assert "did not resolve within 2 s: a name server does not respond" in kinds[kind]["summary"]
    assert seen.outcomes["iface-up"] == "passed"


@pytest.mark.parametrize(
    ("library", "state"), [("NCCL", "is down"), ("NCCL", "has no link"), ("GLOO", "has no address")]
)
def test_an_interface_that_cannot_carry_data(library, state):
    with lent_hosts(1) as hosts:
        hosts.ip(0, "link", "add", "eth1", "type", "veth", "peer", "name", "far")
        if state != "has no address":
            hosts.ip(0, "address", "add", "10.9.0.1/24", "dev", "eth1")
        if state != "is down":
            hosts.ip(0, "link", "set", "eth1", "up")
        if state == "has no address":
            hosts.ip(0, "address", "flush", "dev", "eth1")
            hosts.ip(0, "link", "set", "eth1", "addrgenmode", "none")
            hosts.ip(0, "link", "set", "far", "up")
        finding = check_on(hosts, **{f"{library}_SOCKET_IFNAME": "eth1"}).found["iface-up"]
    assert finding["severity"] == "error"
    assert finding["summary"].endswith(f"would use eth1, which {state}")
    assert finding["fix"].endswith(f"or export {library}_SOCKET_IFNAME=eth0")


def test_the_only_card_has_a_container_engines_name():
    with lent_hosts(1) as hosts:
        hosts.ip(0, "link", "set", "eth0", "down")
        hosts.ip(0, "link", "set", "eth0", "name", "docker0")
        hosts.ip(0, "link", "set", "docker0", "up")
        seen = check_on(hosts, **SEVERAL)
    assert [kind for kind, *_ in seen.findings] == ["iface-agree", "iface-agree"]


def test_a_packet_filter_that_keeps_the_others_out():
    require("ip", "nft")
    with lent_hosts(1) as hosts:
        for rule in FILTER:
            hosts.run(0, "nft", *rule.split(" ", 2))
        alone, several = check_on(hosts), check_on(hosts, **SEVERAL)
        hosts.run(0, *["nft", "insert", "rule", "inet", "guard", "in", "ip", "saddr", "10.0.0.0/8", "accept"])
        opened = check_on(hosts, **SEVERAL)
    assert (alone.findings, opened.findings) == ([], [])
    finding = several.found["firewall-local"]
    assert finding["severity"] == "warning"
    assert "policy drop" in finding["summary"]
    assert any("22" in line for line in finding["evidence"])


FILTER = (
    "add table inet guard",
    "add chain inet guard in { type filter hook input priority 0 ; policy drop ; }",
    "add rule inet guard in ct state established,related accept",
    'add rule inet guard in iifname "lo" accept',
    "add rule inet guard in tcp dport 22 accept",
)


def test_two_hosts_that_agree():
    with lent_hosts(2) as hosts:
        seen = check_all(hosts)
    assert seen.findings == []
    assert [seen.outcomes[kind] for kind in ("mtu", "iface-agree", "v4v6", "hostname-loopback")] == ["passed"] * 4


def test_two_hosts_that_differ():
    with lent_hosts(2) as hosts:
        hosts.ip(1, "link", "set", "eth0", "mtu", "1400")
        hosts.write(1, "hosts", f"127.0.0.1 localhost\n127.0.1.1 dd1\n{hosts.address(1)} dd0\n")
        kinds = check_all(hosts, MASTER_ADDR="dd0").found
    assert set(kinds) >= {"mtu", "hostname-loopback", "master-resolve"}
    assert kinds["mtu"]["summary"].startswith("MTU 1500 on dd0, 1400 on dd1")
    assert kinds["hostname-loopback"]["hosts"] == ["dd1"]
    assert "dd1" in kinds["master-resolve"]["hosts"]


def test_a_port_that_another_process_has():
    serve = (
        "import socket,sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        port = one.stdout.readline().strip()
        finding = check_env(*CHECKS, MASTER_PORT=port).found["port-free"]
        one.stdin.close()
    assert (finding["severity"], finding["summary"]) == (
        "error",
        f"another process uses MASTER_PORT {port}: rank 0 fails with EADDRINUSE",
    )
    assert f"(process {one.pid}) listens on it" in finding["evidence"][0]
    assert finding["fix"].startswith(f"kill {one.pid}")


GLOO = """
import json, os, sys
import torch.distributed as dist
said = {}
for value in json.loads(sys.argv[1]):
    os.environ["GLOO_SOCKET_IFNAME"] = value
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        said[value] = True
    except RuntimeError:
        said[value] = False
print(json.dumps(said))
"""


def test_the_judgment_of_gloos_variable_is_torchs_own():
    values = ["lo", "lo,", "^docker", "=lo", " lo", "l", "", "loo", "lo,nowhere0", "lo,,lo"]
    command = [sys.executable, "-c", GLOO, json.dumps(values)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200, env=os.environ.copy())
    ours = {value: not check_env("ifname-exists", GLOO_SOCKET_IFNAME=value).findings for value in values}
    assert ours == json.loads(done.stdout.splitlines()[-1])
