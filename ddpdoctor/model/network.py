"""Names, addresses and interfaces of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.reading import Unread


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What a name resolves to here. Either ``addresses`` or ``error`` is set."""

    name: str
    addresses: tuple[str, ...]
    error: str | None
    timed_out: bool
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What this host is called, and what others' names mean here."""

    hostname: str
    fqdn: str | None
    own: Lookup
    """Of the host name, as Gloo looks it up."""
    master: Lookup | None
    """Of MASTER_ADDR or the host of the rendezvous endpoint; None where neither is given."""
    head: Lookup | None
    """Of the full name of rank 0's host, which torchrun publishes; None where nothing was gathered."""
    reverse_s: float | None
    """How long the slowest look-up of an own address' name took; the limit where one did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    """IFF_UP: somebody has switched it on."""
    operstate: str
    """As sysfs has it: up, down, unknown, …"""
    carrier: bool | None
    loopback: bool
    virtual: bool
    """No device behind it: a bridge, veth, tunnel, docker0."""
    mtu: int
    speed_mb_s: int | None
    """Megabits per second as sysfs says; None where it does not."""
    addresses: tuple[str, ...]
    """With prefix length: "10.0.0.4/24", "fd00::2/64"."""
    link_type: int
    """ARPHRD_*: 1 Ethernet, 32 InfiniBand, 772 loopback."""

    @property
    def running(self) -> bool:
        """Whether it can carry anything now: IFF_RUNNING, which is IFF_UP and a state of up or unknown."""
        return self.up and self.operstate in {"up", "unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """Whether MASTER_PORT can be listened on here, and who holds it."""

    port: int
    free: bool
    error: str | None
    time_wait: bool
    """Only a closed connection's leftover is in the way."""
    owner_pid: int | None
    owner: str | None
    """The command of the process that listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallChain:
    """A chain of a packet filter that refuses what comes in, save for what it lets through."""

    name: str
    """With the tool that shows it: "nft inet filter input"."""
    refusal: str
    """"policy drop", or the last rule: "reject with icmpx admin-prohibited"."""
    accepts: tuple[str, ...]
    """Rules that let new connections in, as the tool writes them, in this chain or one that it jumps to."""
    manager: str = ""
    """"firewalld" or "ufw" where one of them wrote it, as names of chains show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Interfaces and what the kernel and a firewall do with ports."""

    interfaces: tuple[Interface, ...]
    """In the kernel's order, by index: the order in which NCCL sees them."""
    default_interface: str | None
    """Where the IPv4 default route goes, else the IPv6 one."""
    ipv6_disabled: bool | None
    local_ports: tuple[int, int] | None
    """ip_local_port_range: what the kernel hands out to clients."""
    master_port: PortUse | Unread
    """Unread where no MASTER_PORT is given or the store would be on another host."""
    firewall: tuple[FirewallChain, ...] | Unread
    """Chains that refuse what comes in by default; none: nothing does."""
    mesh_proxy: bool = False
    """The proxy of a service mesh (Istio's Envoy) listens in this network namespace."""
