"""What the nodes of a job saw of each other before it starts: of the store, of every pair of them, of a real start.

Nodes are named by ``number``: the order in which they came, which is the node rank where all is well.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.node import Fleet


class Contact(str, Enum):
    """What came of an attempt to connect."""

    CONNECTED = "connected"
    UNRESOLVED = "unresolved"
    """The name does not resolve here."""
    REFUSED = "refused"
    """ECONNREFUSED: nobody listens there, or a firewall answers with a reset."""
    RESET = "reset"
    """The connection was taken and then broken off."""
    UNREACHABLE = "unreachable"
    """EHOSTUNREACH, ENETUNREACH or EACCES: no route, or a firewall that says so."""
    NO_ANSWER = "no-answer"
    """Nothing came back in time: packets are dropped, or the host is down."""
    NO_STORE = "no-store"
    """Something answers that is no store of torch."""
    FAILED = "failed"
    """Anything else; the error says what."""


def say_place(host: str, port: int) -> str:
    """Return "node0:29500", and an address of IPv6 in brackets, as it is given to torchrun."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connecting:
    """The last attempt to connect to one address."""

    host: str
    """As it was given."""
    address: str | None
    """None where the name did not resolve."""
    port: int
    contact: Contact
    error: str = ""
    """The system's words."""
    duration_s: float = 0.0
    tries: int = 1
    """So many first packets were sent, each from a port of its own; over 1: the ones before went unanswered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What one node saw of the place where the store is to be."""

    host: str
    port: int
    serves: bool
    """Whether it is this node that serves the store, by its node rank or since the address is its own."""
    not_served: str = ""
    """Why it could not serve: a phrase."""
    without_torch: str = ""
    """Why nothing could be tried with torch here, so that no store was served or spoken to: a phrase."""
    attempts: tuple[Connecting, ...] = ()
    """One an address, of the client's side, in the order in which torch tries them; of the node that serves too."""
    way: str = ""
    """How it reached the others in the end: "own port", "store", "folder"; empty: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTold:
    """What one node was told of the job: by options, variables, Slurm or an operator."""

    node_rank: int | None = None
    nnodes: int | None = None
    world_size: int | None = None
    run_id: str = ""
    endpoint: str = ""
    """HOST:PORT as it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Where a node can be reached by the others' ranks: what Gloo or NCCL would publish there."""

    number: int
    address: str
    """Without prefix length; empty where none can be told."""
    interface: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One payload that was sent over a fresh connection, and answered with its checksum."""

    size_bytes: int
    contact: Contact
    """CONNECTED: it arrived whole. NO_ANSWER: it stalled."""
    error: str = ""
    duration_s: float | None = None
    """From the first byte to the answer, or until a payload that stalls was given up."""
    retransmitted: int | None = None
    """Segments that the sender's kernel sent again (tcpi_total_retrans); None where it does not say."""
    sent: int | None = None
    """Segments with data that it sent, those sent again among them (tcpi_data_segs_out)."""
    needless: int | None = None
    """Of those sent again: what had arrived before, so that only its acknowledgement was late or lost
    (tcpi_dsack_dups)."""
    delivered_bytes: int | None = None
    """What the target's kernel acknowledged of a payload that did not get through; 0 where large packets vanish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePair:
    """One ordered pair of nodes: ``source`` connects to a port that ``target`` opened for it alone."""

    source: int
    target: int
    address: str
    """Of the target: what Gloo and NCCL would publish there."""
    port: int
    interface: str
    """Of the target."""
    connecting: Connecting | None = None
    """None where it was not tried; ``skipped`` says why."""
    small: Transfer | None = None
    large: Transfer | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTrial:
    """A real init_process_group and all_reduce of one node, with Gloo and a short limit."""

    node: int
    ok: bool
    stage: str = ""
    """What did not end well: "store", "init_process_group", "all_reduce", "result"."""
    error: str = ""
    """First line of what torch said."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A node that came, or that was to come."""

    number: int
    host: str
    """Empty where nothing was heard."""
    arrived: bool
    told: JobTold
    door: Door | None = None
    published: str = ""
    """The address that Gloo would publish there; empty: none can be told."""
    interface: str = ""
    way_lost: str = ""
    """It came, and was lost later: a phrase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """All that was seen. ``fleet.nodes`` are the nodes that arrived, in the order of ``visits``."""

    nnodes: int
    visits: tuple[Visit, ...]
    fleet: Fleet
    pairs: tuple[NodePair, ...] = ()
    trials: tuple[StartTrial, ...] = ()
    complete: bool = True
    """False for what one node saw alone, since it could not reach the others."""
    trust: str = ""
    """Whom the nodes had to trust: "the token of DDPDOCTOR_TOKEN", …"""
