"""Lines that open a packet filter: they are to be pasted, so they fit the addresses and the filter of the host."""

import pytest

from ddpdoctor.model.network import FirewallChain
from ddpdoctor.rules.firewall_opening import open_ports
from tests.rules.environment.build import node
from tests.rules.environment.network import interface, network

V4, V6 = "10.0.0.11", "fd00:77::b"


def machine(*chains):
    refusing = tuple(FirewallChain(name=name, refusal="policy drop", accepts=()) for name in chains)
    return node("node0", network=network(interface("eth0", "10.0.0.10/24", "fd00:77::a/64"), firewall=refusing))


@pytest.mark.parametrize(
    ("chains", "source", "line"),
    [
        ((), V4, "iptables -I INPUT -p tcp -s 10.0.0.0/24 --dport 29500 -j ACCEPT"),
        ((), V6, "ip6tables -I INPUT -p tcp -s fd00:77::/64 --dport 29500 -j ACCEPT"),
        (("nft inet filter input",), V4, "nft insert rule inet filter input ip saddr 10.0.0.0/24 accept"),
        (("nft inet filter input",), V6, "nft insert rule inet filter input ip6 saddr fd00:77::/64 accept"),
        (("nft ip6 filter INPUT",), V4, "iptables -I INPUT -p tcp -s 10.0.0.0/24 --dport 29500 -j ACCEPT"),
        (
            ("iptables filter INPUT", "nft ip6 filter INPUT"),
            V6,
            "nft insert rule ip6 filter INPUT ip6 saddr fd00:77::/64 accept",
        ),
    ],
)
def test_the_line_fits_the_addresses(chains, source, line):
    assert open_ports(machine(*chains), (29500, 29500), (source,)) == line
