"""How the nodes of a job reach each other before it starts: the store, every pair of nodes, and a trial start.

Nodes are identified by ``number``, the order in which they joined. In a healthy job it equals the node rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.node import Fleet


class Contact(str, Enum):
    """The result of an attempt to connect."""

    CONNECTED = "connected"
    UNRESOLVED = "unresolved"  # the name does not resolve here
    REFUSED = "refused"  # ECONNREFUSED: nobody listens there, or a firewall answers with a reset
    RESET = "reset"  # the connection was accepted and then broken off
    UNREACHABLE = "unreachable"  # EHOSTUNREACH, ENETUNREACH or EACCES: no route, or a firewall that says so
    NO_ANSWER = "no-answer"  # nothing came back in time: packets are dropped, or the host is down
    NO_STORE = "no-store"  # something answers, but it is not a torch store
    FAILED = "failed"  # anything else; the error says what


def say_place(host: str, port: int) -> str:
    """Return "node0:29500". An IPv6 address gets brackets, as torchrun expects it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connecting:
    """The last attempt to connect to one address."""

    host: str  # the host as given
    address: str | None  # None if the name did not resolve
    port: int
    contact: Contact
    error: str = ""  # the system's message
    duration_s: float = 0.0
    tries: int = 1  # Number of connection attempts, each from its own port. Above 1, the earlier ones got no answer.


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """One node's view of the store's address."""

    host: str
    port: int
    serves: bool  # whether this node serves the store, by its node rank or because the address is its own
    not_served: str = ""  # a phrase that says why it could not serve
    without_torch: str = ""  # a phrase that says why torch is unusable here, so that no store was served or contacted
    # Attempts to connect as a client, one per address, in torch's order. The serving node makes them too.
    attempts: tuple[Connecting, ...] = ()
    way: str = ""  # how it finally reached the others: "own port", "store", "folder"; empty: not at all


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The settings of the job on one node, from options, variables, Slurm or an operator."""

    node_rank: int | None = None
    nnodes: int | None = None
    world_size: int | None = None
    run_id: str = ""
    endpoint: str = ""  # HOST:PORT as given


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The address that Gloo or NCCL would publish on a node for the ranks of other nodes."""

    number: int
    address: str  # without prefix length; empty if unknown
    interface: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One payload sent over a new connection. The target answers with its checksum."""

    size_bytes: int
    contact: Contact  # CONNECTED: it arrived complete. NO_ANSWER: it stalled.
    error: str = ""
    duration_s: float | None = None  # from the first byte to the answer, or until the sender gave up
    # Segments that the sender's kernel resent (tcpi_total_retrans), or None if unknown.
    retransmitted: int | None = None
    sent: int | None = None  # data segments sent, including resent ones (tcpi_data_segs_out)
    # Resent segments that had already arrived, so only the acknowledgement was late or lost (tcpi_dsack_dups).
    needless: int | None = None
    # The part of a failed payload that the target's kernel acknowledged. It is 0 if large packets vanish.
    delivered_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePair:
    """One ordered pair of nodes: ``source`` connects to a port that ``target`` opened only for it."""

    source: int
    target: int
    address: str  # the address that Gloo and NCCL would publish on the target
    port: int
    interface: str  # interface of the target
    connecting: Connecting | None = None  # None if it was not tried; ``skipped`` says why
    small: Transfer | None = None
    large: Transfer | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTrial:
    """One node's result of a real init_process_group and all_reduce, with Gloo and a short limit."""

    node: int
    ok: bool
    stage: str = ""  # the stage that failed: "store", "init_process_group", "all_reduce", "result"
    error: str = ""  # first line of torch's error
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A node that joined or should have joined."""

    number: int
    host: str  # empty if unknown
    arrived: bool
    settings: JobSettings = field(metadata={"json": "told"})
    store_view: StoreView | None = field(default=None, metadata={"json": "door"})
    published: str = ""  # the address that Gloo would publish there; empty: unknown
    interface: str = ""
    way_lost: str = ""  # a phrase that says how a node that had joined was lost later


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """All results. ``fleet.nodes`` are the nodes that joined, in the order of ``visits``."""

    nnodes: int
    visits: tuple[Visit, ...]
    fleet: Fleet
    pairs: tuple[NodePair, ...] = ()
    trials: tuple[StartTrial, ...] = ()
    complete: bool = True  # False for the view of a single node that could not reach the others
    trust: str = ""  # What the nodes' trust was based on: "the token of DDPDOCTOR_TOKEN", …
