"""How a job is started: launcher, Slurm, environment, rendezvous, and how the ranks reach each other.

Nodes that are asked to connect before a job starts are identified by the order in which they joined; it equals the node
rank in a healthy job.
"""

from __future__ import annotations

import ipaddress
import pkgutil
import re
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

from ddpdoctor.model.node import Fleet, Launcher, NodeProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Slurm's own limit for a host list (MAX_RANGE, 64k in a default build). A longer list is a damaged value.
MAX_ENTRIES = 65_536

_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([1-9][0-9]{0,8})\))?")
_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
VARIABLE = "CUDA_VISIBLE_DEVICES"
# Prefixes that only NCCL, torch, Gloo, torchrun, CUDA or OpenMP use.
FAMILIES = (
    "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "GLOO_", "TORCHELASTIC_", "CUDA_VISIBLE_", "OMP_NUM_",
)  # fmt: skip
# Common typos. RCCL, HCCL, MCCL and UCCL are missing because they are other libraries.
MISSPELT_FAMILIES = ("NCLL_", "NCL_", "NCC_", "NCCLL_", "NNCL_", "NCLC_", "CNCL_", "TORCH_NCLL_", "TORCH_NCL_", "GLO_")
# Prefixes of network, tuner and profiler plugins and of nccl-tests. The table cannot list all their variables.
PLUGIN_PREFIXES = (
    "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_NETWORKING_", "NCCL_TUNER_CONFIG_", "NCCL_SHARP_", "NCCL_UCX_",
    "NCCL_DMABUF_", "NCCL_TESTS_", "NCCL_INSPECTOR_", "NCCL_PROFILE_", "NCCL_PLUGIN_", "NCCL_SHIMNET_", "OFI_NCCL_",
)  # fmt: skip
# The last releases in the table. NCCL's names come from the source up to 2.30.7, and from the library of 2.32.3.
NEWEST = {"nccl": "2.32.3", "torch": "2.13"}
OLDEST = {"nccl": "2.21.5", "torch": "2.6"}  # The oldest supported torch and its NCCL. Older versions do not matter.
HIDDEN = "hidden"  # the type of a known variable whose value is never kept
_LOGIN = re.compile(r"(?<=//)[^/@\s]*@|^[^/@\s]+:[^/@\s]*@")
# Step ids from here up are not from `srun`: 0xfffffffa is the interactive step of salloc, 0xfffffffb is the batch
# script (slurm.h).
SLURM_SPECIAL_STEPS = 0xFFFFFFF0
# The variables that init_process_group reads with env:// (torch/distributed/rendezvous.py).
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Variables from which a script can set RANK itself.
OTHER_RANK_VARIABLES = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
_ENDPOINT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>.+?))(?::(?P<port>[0-9]{1,5}))?")
_NNODES = re.compile(r"(?:([0-9]{1,6}):)?([0-9]{1,6})")
EXCHANGE_PORT = "DDPDOCTOR_EXCHANGE_PORT"  # holds ddpdoctor's own port, on which the nodes meet


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of SLURM_JOB_NODELIST or SLURM_STEP_NODELIST, "n[08-10]"; raises ValueError if malformed."""
    hosts: list[str] = []
    parts = _HOST.findall(text)
    if ",".join(parts) != text.strip():
        raise ValueError(f"not a list of hosts such as n[1-3],login: {_short_text(text.strip())}")
    for part in parts:
        space = MAX_ENTRIES - len(hosts)  # Expand the ranges of one name. The last range varies fastest.
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            ends = [literal] if literal else _expand_ranges(ranges, space)
            if len(names) * len(ends) > space:
                raise ValueError(f"more than {MAX_ENTRIES} hosts: {_short_text(part)}")
            names = [name + end for name in names for end in ends]
        hosts += names
    if not hosts:
        raise ValueError("the list of hosts is empty")
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of SLURM_TASKS_PER_NODE, one per node. Raises ValueError if it is malformed."""
    counts: list[int] = []
    for part in text.strip().split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"not a list of counts such as 4(x2),1: {_short_text(text)}")
        times = int(found[2] or 1)
        if len(counts) + times > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} nodes: {_short_text(text)}")
        counts += [int(found[1])] * times
    return tuple(counts)


def _expand_ranges(ranges: str, space: int) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        span = _SPAN.fullmatch(part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ValueError(f"not a range of numbers such as 1-3,07: [{_short_text(ranges)}]")
        first, last = int(span[1]), int(span[2] or span[1])
        if len(found) + last - first + 1 > space:
            raise ValueError(f"more than {MAX_ENTRIES} hosts: [{_short_text(ranges)}]")
        found += [f"{number:0{len(span[1])}d}" for number in range(first, last + 1)]
    return found


def _short_text(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """The effect of a value of CUDA_VISIBLE_DEVICES on a machine with certain GPUs."""

    entries: tuple[str, ...]  # the entries as written; empty if the variable is not set
    devices: tuple[str, ...]  # UUIDs of the GPUs that a process sees, in its order. A MIG slice keeps its own name.
    bad_entry: str | None = None  # The first entry that names no device. CUDA stops reading there.
    hidden: tuple[str, ...] = ()  # entries after the bad one
    repeated: tuple[str, ...] = ()  # Devices that are named more than once. CUDA then shows no device at all.

    @property
    def on_purpose(self) -> bool:
        """Whether the value hides all GPUs on purpose: empty, -1, or Slurm's value for a step without GPUs."""
        return self.entries[:1] in {("",), ("-1",), ("NoDevFiles",)}


def read_visible(value: str | None, uuids: Sequence[str]) -> Visible:
    """Resolve a value as CUDA does: up to the first bad entry, and to no device at all if one is named twice."""
    if value is None:
        return Visible(entries=(), devices=tuple(uuids))
    entries = tuple(entry.strip() for entry in value.split(","))
    chosen: list[str] = []
    bad = None
    for entry in entries:
        # Find the device of an index or of a UUID prefix. A MIG slice is returned unchanged.
        if entry.isascii() and entry.isdecimal():
            index = int(entry)
            device = uuids[index] if index < len(uuids) else None
        elif entry.startswith("MIG-"):
            device = entry if uuids else None
        else:
            matching = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
            device = matching[0] if len(matching) == 1 else None
        if device is None:
            bad = entry
            break
        chosen.append(device)
    repeated = tuple(dict.fromkeys(device for device in chosen if chosen.count(device) > 1))
    return Visible(
        entries=entries, devices=() if repeated else tuple(chosen), bad_entry=bad, hidden=entries[len(chosen) + 1 :],
        repeated=repeated,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A row of the table. Versions are those of ``component``; empty if unknown."""

    name: str
    component: str  # nccl, torch, gloo, launcher, slurm, k8s, mpi, cuda, container, openmp, network, loader, build
    kind: str  # config, tune, debug, internal, danger, deprecated, removed, bogus (never existed), launcher, build
    type: str  # the valid values, in the grammar of ``rules/variables.py``
    default: str
    since: str  # the first version that reads it
    until: str  # The last version that reads it. For a deprecated variable, the last version before its deprecation.
    replaced_by: str
    agree: bool  # whether it must be equal on all ranks
    danger: str  # the harmful values, in the grammar of ``rules/variables.py``; empty: none
    source: str
    note: str

    @property
    def shown(self) -> bool:
        """Whether its value may be kept and shown."""
        return self.type != HIDDEN


@cache
def read_variables() -> Mapping[str, Variable]:
    """Return the table by name."""
    table = pkgutil.get_data("ddpdoctor.model", "variables.tsv") or b""  # importlib.resources takes 20 ms to import
    names = [field.name for field in fields(Variable)]
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in table.decode("utf-8").splitlines()[1:]]
    return {row["name"]: Variable(**{**row, "agree": row["agree"] == "yes"}) for row in rows}  # type: ignore[arg-type]


def find_variable(name: str) -> Variable | None:
    """Return the row of a variable, or None. Names are case-sensitive, like the environment."""
    return read_variables().get(name)


def is_listed(name: str) -> bool:
    """Return whether the value of a variable may be kept and shown."""
    variable = find_variable(name)
    return variable is not None and variable.shown


def looks_known(name: str) -> bool:
    """Return whether a name looks like a variable of NCCL, torch, Gloo or torchrun, even if misspelled."""
    upper = name.upper()
    return upper.startswith((*FAMILIES, *MISSPELT_FAMILIES)) and not upper.startswith(PLUGIN_PREFIXES)


def select_variables(env: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the listed variables with values, and the names of unlisted variables that look like one."""
    listed = {name: hide_login(env[name]) for name in sorted(env) if is_listed(name)}
    others = tuple(name for name in sorted(env) if find_variable(name) is None and looks_known(name))
    return listed, others


def hide_login(value: str) -> str:
    """Remove the user name and password of a URL or host from a value."""
    return _LOGIN.sub("", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of the store, and the variable that sets it."""

    variable: str
    host: str
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """The number of nodes of the job, and its source: "GROUP_WORLD_SIZE is 2"."""

    nodes: int
    source: str


def text_of(process: NodeProcess, name: str) -> str:
    """Return a variable, stripped of white space. It is empty if unset, which is the same to torch."""
    return process.variables.get(name, "").strip()


def by_torchrun(process: NodeProcess) -> bool:
    """Return whether torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in process.variables


def in_slurm_step(process: NodeProcess) -> bool:
    """Return whether srun started this process or its launcher. It is false in the shell of sbatch and salloc."""
    step = process.number("SLURM_STEP_ID")
    return step is not None and step < SLURM_SPECIAL_STEPS


def nodes_range(text: str) -> tuple[int, int] | None:
    """Parse torchrun's --nnodes ("2" or "1:4") into the least and most nodes, or return None if it is malformed."""
    found = _NNODES.fullmatch(text.strip())
    if found is None:
        return None
    return int(found[1] or found[2]), int(found[2])


def read_node_count(process: NodeProcess) -> NodeCount | None:
    """Return the number of nodes in the variables, torchrun's first: its command line overrides Slurm's."""
    groups = process.number("GROUP_WORLD_SIZE")
    if by_torchrun(process) and groups is not None:
        return NodeCount(nodes=groups, source=f"GROUP_WORLD_SIZE is {groups}")
    world, local = process.number("WORLD_SIZE"), process.number("LOCAL_WORLD_SIZE")
    if world is not None and local is not None and 0 < local <= world:
        return NodeCount(nodes=-(-world // local), source=f"WORLD_SIZE is {world} and LOCAL_WORLD_SIZE is {local}")
    given = nodes_range(text_of(process, "PET_NNODES"))
    if given is not None:
        return NodeCount(nodes=given[1], source=f"PET_NNODES is {text_of(process, 'PET_NNODES')}")
    nodes = process.number("SLURM_NNODES")
    if in_slurm_step(process) and nodes is not None:
        return NodeCount(nodes=nodes, source=f"SLURM_NNODES is {nodes}")
    return None


def parse_endpoint(text: str, variable: str) -> Endpoint | None:
    """Parse HOST, HOST:PORT or [IPV6]:PORT as torchrun does, or return None if it is empty."""
    found = _ENDPOINT.fullmatch(text.strip())
    if found is None:
        return None
    port = found["port"]
    return Endpoint(variable=variable, host=found["v6"] or found["host"], port=int(port) if port is not None else None)


def endpoints(process: NodeProcess) -> tuple[Endpoint, ...]:
    """Return all addresses in the variables: of the ranks' store and of torchrun's rendezvous."""
    found = [
        Endpoint(variable=variable, host=text_of(process, variable), port=process.number(variable[:-4] + "PORT"))
        for variable in ("MASTER_ADDR", "PET_MASTER_ADDR")
        if text_of(process, variable)
    ]
    rendezvous = parse_endpoint(text_of(process, "PET_RDZV_ENDPOINT"), "PET_RDZV_ENDPOINT")
    return (*found, rendezvous) if rendezvous is not None else tuple(found)


def is_loopback_address(text: str) -> bool:
    """Return whether a text is an address in 127.0.0.0/8 or ::1."""
    address = parse_address(text)
    return address is not None and address.is_loopback


def is_loopback(host: str) -> bool:
    """Return whether a name or address always means the local host. 0.0.0.0 and :: do so when connecting."""
    address = parse_address(host)
    if address is not None:
        return address.is_loopback or address.is_unspecified
    return host.lower().rstrip(".") in LOOPBACK_NAMES


def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, with or without a zone, or None for a name."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The job of this process, according to the environment and the command line."""

    launcher: Launcher = Launcher.NONE
    # The rank among the gathering processes: from torchrun or Slurm, or the node's number with --nnodes. It may differ
    # from the RANK that the training script would see, which the checks assess.
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    nnodes: int | None = None
    hosts: tuple[str, ...] = ()  # names or addresses of the host of rank 0, the most likely first
    port: int = 0
    run: str = ""  # identifies this run among others that meet at the same address
    agent_store: bool = False  # whether the launcher itself serves a store there, as torchrun's agent does by default

    @property
    def gathers(self) -> bool:
        return self.launcher is not Launcher.NONE and self.world_size > 1

    @property
    def reads_node(self) -> bool:
        """Whether this is the one process of its host that reads the host."""
        return self.local_rank in {0, None}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunch:
    """What this node knows about a job before its nodes have met."""

    # ``rank`` is that among the checking processes, ``hosts`` are candidates for the first node, and ``port`` is
    # ddpdoctor's own.
    launch: Launch
    settings: JobSettings
    host: str  # the host of the store, as given
    port: int
    fewest: int  # The least number of nodes that an elastic job starts with. For other jobs, all nodes.
    most: int
    hosts: tuple[str, ...] = ()  # names of all nodes by node rank, if a scheduler provides them
    by_number: bool = True  # node 0 serves the store; else the node that considers itself ``host``, as in c10d
    is_host: bool | None = None  # the setting of --rdzv-conf for this node, which overrides ``by_number``
    own_screen: bool = True  # whether each node was started separately, so that each can print its own report

    @property
    def label(self) -> str:
        """The name of this node among the others: "node 1", or "this node"."""
        return "this node" if self.settings.node_rank is None else f"node {self.settings.node_rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The command's options under torchrun's names. None: not given."""

    nnodes: str | None = None  # "2", or "1:4"
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    exchange_port: int | None = None

    def variables(self) -> dict[str, str]:
        """Return the options as the equivalent environment variables of torchrun."""
        given = {
            "PET_NNODES": self.nnodes, "PET_NODE_RANK": self.node_rank, "PET_MASTER_ADDR": self.master_addr,
            "PET_MASTER_PORT": self.master_port,
            "PET_RDZV_BACKEND": self.rdzv_backend or ("c10d" if self.rdzv_endpoint else None),
            "PET_RDZV_ENDPOINT": self.rdzv_endpoint, "PET_RDZV_ID": self.rdzv_id, "PET_RDZV_CONF": self.rdzv_conf,
            EXCHANGE_PORT: self.exchange_port,
        }  # fmt: skip
        return {name: str(value) for name, value in given.items() if value is not None}


class Contact(str, Enum):
    """The result of an attempt to connect."""

    CONNECTED = "connected"
    UNRESOLVED = "unresolved"  # the name does not resolve here
    REFUSED = "refused"  # ECONNREFUSED: no process listens there, or a firewall answers with a reset
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
    attempts: tuple[Connecting, ...] = ()  # as a client, one per address, in torch's order; the server too
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
    retransmitted: int | None = None  # segments that the sender's kernel resent (tcpi_total_retrans)
    sent: int | None = None  # data segments sent, including resent ones (tcpi_data_segs_out)
    needless: int | None = None  # resent segments that had arrived: only the acknowledgement was late (tcpi_dsack_dups)
    delivered_bytes: int | None = None  # what the target's kernel acknowledged; 0 if large packets vanish


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
