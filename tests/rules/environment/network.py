"""Names and interfaces for tables, with a healthy machine as their default."""

from ddpdoctor.model.node import Interface, Lookup, Names, Network
from ddpdoctor.model.reading import Unread, Why

NO_PORT = Unread(why=Why.ABSENT, reason="MASTER_PORT is not set")


def interface(name="eth0", *addresses, up=True, operstate=None, carrier=True, virtual=False, mtu=1500):
    loopback = name == "lo"
    return Interface(
        name=name, up=up, operstate=operstate or ("up" if up else "down"), carrier=carrier, loopback=loopback,
        virtual=virtual or loopback, mtu=65536 if loopback else mtu, speed_mb_s=None,
        addresses=addresses or (("127.0.0.1/8", "::1/128") if loopback else ()), link_type=772 if loopback else 1,
    )  # fmt: skip


LO = interface("lo", operstate="unknown")


def network(*interfaces, default="eth0", ipv6_disabled=False, local_ports=(32768, 60999), port=NO_PORT, firewall=()):
    return Network(
        interfaces=(LO, *(interfaces or (interface("eth0", "10.0.0.4/24"),))), default_interface=default,
        ipv6_disabled=ipv6_disabled, local_ports=local_ports, master_port=port, firewall=firewall,
    )  # fmt: skip


def lookup(name, *addresses, error=None, timed_out=False, duration_s=0.001):
    if not addresses and error is None:
        error = "no answer within 2 s" if timed_out else "Name or service not known"
    return Lookup(name=name, addresses=addresses, error=error, timed_out=timed_out, duration_s=duration_s)


def names(*own, hostname="node0", fqdn=None, master=None, head=None, reverse_s=0.001, **more):
    return Names(
        hostname=hostname, fqdn=fqdn or hostname, own=lookup(hostname, *own, **more), master=master, head=head,
        reverse_s=reverse_s,
    )  # fmt: skip
