"""The checks on names, interfaces and ports, on hosts with a network, /etc/hosts and packet filter of their own."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.scenarios.hosts import lent_hosts, require
from tests.scenarios.running import clean_environment, free_port

pytestmark = pytest.mark.usefixtures("preloaded_python")

CHECKS = (
    "hostname-loopback", "hostname-unresolvable", "hostname-not-local", "fqdn-forward", "master-resolve", "rdns-slow",
    "ifname-exists", "iface-up", "iface-agree", "v4v6", "mtu", "port-free", "firewall-local",
)  # fmt: skip
CHECK_ENV = (sys.executable, "-m", "ddpdoctor", "check-env", *CHECKS, "--format", "json", "--no-torch")
SEVERAL = {"PET_NNODES": "2"}
DEAD_SERVER = "nameserver 203.0.113.53\n"
"""An address for documentation: packets to it are lost without a word."""


def environment(**variables):
    foreign = ("NCCL_", "GLOO_", "TP_", "SLURM_", "TORCHELASTIC_", "GROUP_", "NODE_RANK")
    kept = {name: value for name, value in clean_environment().items() if not name.startswith(foreign)}
    return kept | variables


def report_of(process):
    output, errors = process.communicate(timeout=200)
    assert output.startswith("{"), errors
    return json.loads(output)


def check_here(**variables):
    command = subprocess.Popen(CHECK_ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment(**variables))  # fmt: skip
    return report_of(command)


def check_on(hosts, number=0, *options, **variables):
    return report_of(hosts.start(number, *CHECK_ENV, *options, env=environment(**variables)))


def check_all(hosts, **variables):
    """Start the command on every host, as a person would, and return the first one's report."""
    meet = ("--nnodes", str(hosts.count), "--master-addr", hosts.address(0), "--master-port", str(free_port()))
    started = [
        hosts.start(number, *CHECK_ENV, *meet, "--node-rank", str(number), env=environment(**variables))
        for number in range(hosts.count)
    ]
    report = report_of(started[0])
    for other in started[1:]:
        other.communicate(timeout=200)
    return report


def found(report):
    return {finding["kind"]: finding for finding in report["findings"]}


def outcomes(report):
    return {check["id"]: check["outcome"] for check in report["checks"]}


def seen(report, kind):
    return next(check["seen"] or check["reason"] for check in report["checks"] if check["id"] == kind)


def test_a_healthy_host():
    with lent_hosts(1) as hosts:
        report = check_on(hosts)
    assert report["findings"] == []
    assert seen(report, "iface-up") == f"Gloo would use eth0 ({hosts.address(0)}), NCCL eth0 ({hosts.address(0)})"


@pytest.mark.parametrize(("variables", "kinds"), [({}, set()), (SEVERAL, {"hostname-loopback"})])
def test_a_name_that_means_loopback(variables, kinds):
    with lent_hosts(1) as hosts:
        hosts.write(0, "hosts", "127.0.0.1 localhost\n127.0.1.1 dd0\n")
        report = check_on(hosts, **variables)
    assert set(found(report)) == kinds
    for finding in report["findings"]:
        assert (finding["severity"], finding["hosts"]) == ("error", ["dd0"])
        assert finding["fix"].startswith("export GLOO_SOCKET_IFNAME=eth0 on all nodes")


def test_a_name_that_nobody_knows():
    with lent_hosts(1) as hosts:
        hosts.write(0, "hosts", "127.0.0.1 localhost\n")
        finding = found(check_on(hosts))["hostname-unresolvable"]
    assert finding["severity"] == "error"
    assert "does not resolve" in finding["summary"]


def test_a_remedy_for_a_name_that_nobody_knows():
    with lent_hosts(1) as hosts:
        hosts.write(0, "hosts", "127.0.0.1 localhost\n")
        fix = found(check_on(hosts))["hostname-unresolvable"]["fix"].partition(";")[0].replace("sudo ", "")
        started = hosts.start(0, "sh", "-c", f'{fix} >&2; exec "$@"', "sh", *CHECK_ENV, env=environment())
        report = report_of(started)
    assert report["findings"] == []


def test_a_dead_name_server_is_cut_off_and_the_rest_is_reported():
    with lent_hosts(1) as hosts:
        hosts.write(0, "hosts", "127.0.0.1 localhost\n")
        hosts.write(0, "resolv.conf", DEAD_SERVER)
        report = check_on(hosts, MASTER_ADDR="head.example")
    kinds = found(report)
    assert set(kinds) == {"hostname-unresolvable", "master-resolve", "rdns-slow"}
    for kind in ("hostname-unresolvable", "master-resolve"):
        assert "did not resolve within 2 s: a name server does not respond" in kinds[kind]["summary"]
    assert outcomes(report)["iface-up"] == "passed"


def test_a_name_of_another_host():
    with lent_hosts(1) as hosts:
        hosts.write(0, "hosts", "127.0.0.1 localhost\n203.0.113.9 dd0\n")
        finding = found(check_on(hosts))["hostname-not-local"]
    assert (finding["severity"], finding["evidence"]) == ("error", ["dd0 resolves to 203.0.113.9"])


@pytest.mark.parametrize("library", ["NCCL", "GLOO"])
@pytest.mark.parametrize("state", ["is down", "has no link", "has no address"])
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
        report = check_on(hosts, **{f"{library}_SOCKET_IFNAME": "eth1"})
    finding = found(report)["iface-up"]
    assert finding["severity"] == "error"
    assert finding["summary"].endswith(f"would use eth1, which {state}")
    assert finding["fix"].endswith(f"or export {library}_SOCKET_IFNAME=eth0")


def test_the_only_card_has_a_container_engines_name():
    with lent_hosts(1) as hosts:
        hosts.ip(0, "link", "set", "eth0", "down")
        hosts.ip(0, "link", "set", "eth0", "name", "docker0")
        hosts.ip(0, "link", "set", "docker0", "up")
        report = check_on(hosts, **SEVERAL)
    kinds = [finding["kind"] for finding in report["findings"]]
    assert kinds == ["iface-agree", "iface-agree"]


def test_nccl_takes_loopback_where_docker_alone_is_left_out():
    with lent_hosts(1) as hosts:
        report = check_on(hosts, NCCL_SOCKET_IFNAME="^docker0", **SEVERAL)
    assert found(report)["iface-agree"]["summary"].startswith("NCCL would use lo (127.0.0.1), which is loopback")


@pytest.mark.parametrize("table", ["nft", "iptables"])
def test_a_packet_filter_that_keeps_the_others_out(table):
    require("ip", "nft", "iptables")
    with lent_hosts(1) as hosts:
        for rule in FILTERS[table]:
            assert hosts.start(0, *rule.split(" ", 3 if table == "nft" else -1)).wait(timeout=200) == 0
        alone, several = check_on(hosts), check_on(hosts, **SEVERAL)
        assert hosts.start(0, *OPENINGS[table].split()).wait(timeout=200) == 0
        opened = check_on(hosts, **SEVERAL)
    assert (alone["findings"], opened["findings"]) == ([], [])
    finding = found(several)["firewall-local"]
    assert finding["severity"] == "warning"
    assert "policy drop" in finding["summary"]
    assert any("22" in line for line in finding["evidence"])


FILTERS = {
    "nft": (
        "nft add table inet guard",
        "nft add chain inet guard in { type filter hook input priority 0 ; policy drop ; }",
        "nft add rule inet guard in ct state established,related accept",
        'nft add rule inet guard in iifname "lo" accept',
        "nft add rule inet guard in tcp dport 22 accept",
    ),
    "iptables": (
        "iptables -A INPUT -i lo -j ACCEPT",
        "iptables -A INPUT -m state --state RELATED,ESTABLISHED -j ACCEPT",
        "iptables -A INPUT -p tcp --dport 22 -j ACCEPT",
        "iptables -P INPUT DROP",
    ),
}
OPENINGS = {
    "nft": "nft insert rule inet guard in ip saddr 10.0.0.0/8 accept",
    "iptables": "iptables -I INPUT -s 10.0.0.0/8 -j ACCEPT",
}


def test_two_hosts_that_agree():
    with lent_hosts(2) as hosts:
        report = check_all(hosts)
    assert report["findings"] == []
    reported = outcomes(report)
    assert [reported[kind] for kind in ("mtu", "iface-agree", "v4v6", "hostname-loopback")] == ["passed"] * 4


def test_two_hosts_that_differ():
    with lent_hosts(2) as hosts:
        hosts.ip(1, "link", "set", "eth0", "mtu", "1400")
        hosts.write(1, "hosts", f"127.0.0.1 localhost\n127.0.1.1 dd1\n{hosts.address(1)} dd0\n")
        report = check_all(hosts, MASTER_ADDR="dd0")
    kinds = found(report)
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
        finding = found(check_here(MASTER_PORT=port))["port-free"]
        one.stdin.close()
    assert (finding["severity"], finding["summary"]) == (
        "error",
        f"another process uses MASTER_PORT {port}: rank 0 fails with EADDRINUSE",
    )
    assert f"(process {one.pid}) listens on it" in finding["evidence"][0]
    assert finding["fix"].startswith(f"kill {one.pid}")


def test_a_port_with_connections_in_time_wait():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # who closes first keeps TIME_WAIT
            assert client.recv(1) == b""
    finding = found(check_here(MASTER_PORT=str(port)))["port-free"]
    assert finding["severity"] == "info"
    assert "TIME_WAIT" in finding["summary"]


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
    ours = {value: "ifname-exists" not in found(check_here(GLOO_SOCKET_IFNAME=value)) for value in values}
    assert ours == json.loads(done.stdout.splitlines()[-1])
