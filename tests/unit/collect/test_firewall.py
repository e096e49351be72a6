import pytest

from ddpdoctor.collect.firewall import read_firewall
from ddpdoctor.collect.system import System
from tests.machines import RecordedCalls

NFT_DROP = """table inet filter {
	set peers {
		type ipv4_addr
		elements = { 10.0.0.1, 10.0.0.2,
				10.0.0.3 }
	}

	chain input {
		type filter hook input priority filter; policy drop;
		ct state established,related accept
		ct state { established, related } accept
		iifname "lo" accept
		ip protocol icmp accept
		tcp dport { 22, 80,
				443 } counter packets 3 bytes 180 accept comment "web"
		ip saddr @peers accept
		counter packets 1 bytes 40 drop
	}

	chain forward {
		type filter hook forward priority filter; policy drop;
	}

	chain output {
		type filter hook output priority filter; policy accept;
	}
}
"""
FIREWALLD = """table inet firewalld {
	chain filter_INPUT {
		type filter hook input priority filter + 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid drop
		jump filter_INPUT_ZONES
		reject with icmpx admin-prohibited
	}

	chain filter_INPUT_ZONES {
		iifname "eth0" goto filter_IN_public
		goto filter_IN_public
	}

	chain filter_IN_public {
		jump filter_IN_public_allow
		jump filter_INPUT_ZONES
	}

	chain filter_IN_public_allow {
		tcp dport 22 accept
		ip6 daddr fe80::/64 udp dport 546 accept
	}
}
"""
UFW = """*nat
:PREROUTING ACCEPT [0:0]
COMMIT
*filter
:INPUT DROP [3:120]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:ufw-before-input - [0:0]
:ufw-user-input - [0:0]
-A INPUT -j ufw-before-input
-A INPUT -j ufw-user-input
-A ufw-before-input -i lo -j ACCEPT
-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-input -p icmp -m icmp --icmp-type 8 -j ACCEPT
-A ufw-user-input -p tcp -m tcp --dport 22 -j ACCEPT
COMMIT
"""
ORACLE = """*filter
:INPUT ACCEPT [0:0]
-A INPUT -m state --state RELATED,ESTABLISHED -j ACCEPT
-A INPUT -p tcp -m state --state NEW -m tcp --dport 22 -j ACCEPT
-A INPUT -j REJECT --reject-with icmp-host-prohibited
COMMIT
"""
DOCKER = """*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A DOCKER-USER -j RETURN
COMMIT
"""


def read(root, *, nft=None, iptables=None):
    answers = {"run nft list ruleset": nft, "run iptables-save": iptables}
    recorded = {name: text.replace("\n", "\\n") for name, text in answers.items() if text is not None}
    return read_firewall(System(root=root, env={}, calls=RecordedCalls(answers=recorded)))


def test_nft_with_policy_drop(tmp_path):
    (chain,) = read(tmp_path, nft=NFT_DROP)
    assert (chain.name, chain.refusal, chain.manager) == ("nft inet filter input", "policy drop", "")
    assert chain.accepts == ("tcp dport { 22, 80, 443 } accept", "ip saddr @peers accept")


def test_firewalld(tmp_path):
    (chain,) = read(tmp_path, nft=FIREWALLD)
    assert chain.refusal == "last rule: reject with icmpx admin-prohibited"
    assert (chain.manager, chain.accepts) == (
        "firewalld",
        ("tcp dport 22 accept", "ip6 daddr fe80::/64 udp dport 546 accept"),
    )


def test_ufw(tmp_path):
    (chain,) = read(tmp_path, iptables=UFW)
    assert (chain.name, chain.refusal, chain.manager) == ("iptables filter INPUT", "policy drop", "ufw")
    assert chain.accepts == ("-p tcp -m tcp --dport 22 -j ACCEPT",)


def test_a_cloud_image_that_rejects_at_the_end(tmp_path):
    (chain,) = read(tmp_path, iptables=ORACLE)
    assert chain.refusal == "last rule: -j REJECT --reject-with icmp-host-prohibited"
    assert chain.accepts == ("-p tcp -m state --state NEW -m tcp --dport 22 -j ACCEPT",)


@pytest.mark.parametrize(("nft", "iptables"), [("", DOCKER), ("", ""), ("", None), (None, DOCKER)])
def test_nothing_refuses(tmp_path, nft, iptables):
    assert read(tmp_path, nft=nft, iptables=iptables) == ()


def test_a_chain_that_both_tools_show_is_reported_once(tmp_path):
    nft = "table ip filter {\n\tchain INPUT {\n\t\ttype filter hook input priority filter; policy drop;\n\t}\n}\n"
    (chain,) = read(tmp_path, nft=nft, iptables=UFW)
    assert chain.name == "iptables filter INPUT"
