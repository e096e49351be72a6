"""DD206: whether the store's address means a different host on every node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import name_list
from ddpdoctor.model.reading import known
from ddpdoctor.model.rendezvous import endpoints, is_loopback, text_of
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.processes import FIRST_HOST_OF_SLURM, NO_ADDRESS, count_nodes, ranks_of
from ddpdoctor.rules.registry import Group, rule

if TYPE_CHECKING:
    from ddpdoctor.model.network import Names
    from ddpdoctor.model.node import Fleet, Node, Process
    from ddpdoctor.model.rendezvous import Endpoint

_ITSELF = "every node but the first looks for the store on itself, and waits"
_NOBODY = "ranks look for the store where nobody listens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An address that a process was given. ``first``: whether its node holds rank 0, or None if that is not known."""

    node: Node
    process: Process
    endpoint: Endpoint
    first: bool | None


@rule(
    "DD206", "master-loopback", Severity.ERROR, "MASTER_ADDR means this very host on a node that is not the first",
    after=("master-numeric",),
    group=Group.NETWORK, needs=("names",),
    reads="MASTER_ADDR, PET_MASTER_ADDR, PET_RDZV_ENDPOINT, the number of nodes, getaddrinfo",
)  # fmt: skip
def check_master_loopback(fleet: Fleet) -> Answer:
    """Report an address of the store that means a different host on every node.

    ## What it means

    With several nodes, `localhost` is a different host on each. Every node but the first looks for the store on itself.
    It waits without a message until the time limit: 30 minutes with Gloo, 10 with NCCL, or 600 seconds in torchrun's
    rendezvous.

    ## How it is recognized

    The job has more than one node, and one of these is true: the address is `localhost`, in 127.0.0.0/8, `::1`,
    `0.0.0.0` or `::`; it resolves to such an address; or it is the host name of a node that does not run rank 0. The
    number of nodes comes from the nodes that answered, the launcher, `GROUP_WORLD_SIZE`, `WORLD_SIZE` against
    `LOCAL_WORLD_SIZE`, `PET_NNODES` or a Slurm step's `SLURM_NNODES`.

    ## What else looks like it

    On the first node itself such an address does no harm: rank 0 listens on all addresses, and older Kubernetes
    operators give the first pod `localhost` on purpose. If only the first node answers, it is a warning, unless the
    address was given as an option and the other nodes are missing: then it is an error. With c10d any node may host the
    rendezvous, as long as all nodes name the same one.

    ## What to do

    Give all nodes the first node's host name, not the output of `hostname` on each node.
    """
    given = [
        Given(node=node, process=process, endpoint=endpoint, first=_is_first(fleet, node, process))
        for node, process in fleet.processes()
        for endpoint in endpoints(process)
    ]
    if not given:
        return skipped(NO_ADDRESS)
    hosts = _hosts_by_variable(given)
    seen = ", ".join(f"{variable}={name_list(tuple(those))}" for variable, those in hosts.items())
    count = count_nodes(fleet)
    if count is None or count.nodes < 2:
        return passed(f"{seen}; the job has one node" if count is not None else f"{seen}; no second node is known of")
    wrong: dict[tuple[str, str], list[Given]] = {}
    for one in given:
        how = _what_is_wrong(fleet, one, differs=len(hosts[one.endpoint.variable]) > 1)
        if how is not None:
            wrong.setdefault((one.endpoint.variable, how), []).append(one)
    evidence = f"{count.nodes} nodes: {count.source}"
    return judged([_problem(fleet, how, those, evidence) for (_, how), those in wrong.items()], f"{seen}; {evidence}")


def _hosts_by_variable(given: list[Given]) -> dict[str, dict[str, None]]:
    hosts: dict[str, dict[str, None]] = {}
    for one in given:
        hosts.setdefault(one.endpoint.variable, {})[one.endpoint.host] = None
    return hosts


def _is_first(fleet: Fleet, node: Node, process: Process) -> bool | None:
    """Say whether a node holds rank 0. Return None if that is not known."""
    if fleet.gathered and len(fleet.nodes) > 1:
        return node is fleet.nodes[0]
    numbers = [process.number(name) for name in ("GROUP_RANK", "PET_NODE_RANK", "SLURM_NODEID", "RANK")]
    return next((number == 0 for number in numbers if number is not None), None)


def _what_is_wrong(fleet: Fleet, given: Given, *, differs: bool) -> str | None:
    """Return what is wrong with an address, or None. The host is left out if each node has its own."""
    if given.first and fleet.gathered and len(fleet.nodes) > 1:
        return None
    host, names = given.endpoint.host, known(given.node.names)
    if is_loopback(host):
        return f"is {host}, and means a different host on each: {_ITSELF}"
    if names is None or given.first is not False:
        return None
    if host in {names.hostname, names.fqdn}:
        return _own_name(given, differs=differs)
    return _looked_up_to_loopback(host, names)


def _own_name(given: Given, *, differs: bool) -> str | None:
    """Judge the name of a node that is not the first.

    With c10d any node may be the endpoint's host. But it is wrong if each node gives its own name, or if the variables
    already number the ranks or nodes: then only number 0 listens.
    """
    if differs:
        return f"is the host's own name, and rank 0 is on another: {_NOBODY}"
    numbered = any(text_of(given.process, name) for name in ("RANK", "PET_NODE_RANK"))
    if numbered and given.endpoint.variable != "PET_RDZV_ENDPOINT":
        return f"is {given.endpoint.host}, a host that rank 0 is not on: {_NOBODY}"
    return None


def _looked_up_to_loopback(host: str, names: Names) -> str | None:
    looked_up = names.master.addresses if names.master is not None and names.master.name == host else ()
    if looked_up and all(is_loopback(address) for address in looked_up):
        return f"is {host}, and is looked up to {looked_up[0]} there: {_ITSELF}"
    return None


def _problem(fleet: Fleet, how: str, those: list[Given], evidence: str) -> Problem:
    endpoint = those[0].endpoint
    return Problem(
        summary=f"{endpoint.variable} {how}",
        evidence=(evidence,),
        fix=f"export {endpoint.variable}={_right_value(fleet, endpoint)} on all nodes",
        severity=Severity.WARNING if _may_be_meant(fleet, those) else None,
        ranks=ranks_of(one.process for one in those),
        hosts=tuple(dict.fromkeys(one.node.host for one in those)),
    )


def _may_be_meant(fleet: Fleet, those: list[Given]) -> bool:
    """Say whether an operator may have set it on purpose, for the first node only. An option goes to all nodes."""
    is_option = those[0].endpoint.variable != "MASTER_ADDR"
    return all(one.first for one in those) and not (is_option and fleet.missing)


def _right_value(fleet: Fleet, endpoint: Endpoint) -> str:
    """Return the right value: the first node's name, or a placeholder if it is not known."""
    variables = fleet.nodes[0].first.variables
    if fleet.gathered and len(fleet.nodes) > 1:
        host = fleet.nodes[0].host
    elif "SLURM_JOB_NODELIST" in variables:
        host = FIRST_HOST_OF_SLURM
    else:
        host = "NAME_OF_THE_FIRST_HOST"
    return f"{host}:{endpoint.port or 29500}" if endpoint.variable == "PET_RDZV_ENDPOINT" else host
