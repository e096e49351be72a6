"""DD206: whether the address of the store means another host on every node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known
from ddpdoctor.model.rendezvous import endpoints, is_loopback, text_of
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.processes import merge_equal, ranks_of
from ddpdoctor.rules.node_count import count_nodes
from ddpdoctor.rules.registry import Group, fleet_rule

if TYPE_CHECKING:
    from ddpdoctor.model.network import Names
    from ddpdoctor.model.node import Fleet, Node, Process
    from ddpdoctor.model.rendezvous import Endpoint, NodeCount


@fleet_rule(
    "DD206", "master-loopback", Severity.ERROR, "MASTER_ADDR means this very host on a node that is not the first",
    group=Group.NETWORK, needs=("names",),
    reads="MASTER_ADDR, PET_MASTER_ADDR, PET_RDZV_ENDPOINT, the number of nodes, getaddrinfo",
)  # fmt: skip
def check_master_loopback(fleet: Fleet) -> Answer:
    """Report an address of the store that means another host on every node.

    ## What it means

    With several nodes, `localhost` is a different host on each. Every node but the first looks for the store on itself
    and waits in silence until the time limit: 30 minutes with Gloo, 10 with NCCL, or 600 seconds of torchrun's
    rendezvous.

    ## How it is told

    The address is `localhost`, in 127.0.0.0/8, `::1`, `0.0.0.0` or `::`, is looked up to such an address, or is the
    host name of a node that rank 0 is not on; and the job has more than one node, by the nodes that answered, the
    launcher, `GROUP_WORLD_SIZE`, `WORLD_SIZE` against `LOCAL_WORLD_SIZE`, `PET_NNODES` or a Slurm step's
    `SLURM_NNODES`.

    ## What else looks like it

    On the first node itself it does no harm: rank 0 listens on all addresses, and older operators of Kubernetes give
    the first pod `localhost` on purpose. Seen on the first node alone, with nobody else to ask, it is a warning.

    ## What to do

    Give all nodes the same name of the first node's host, not the output of `hostname` on each.
    """
    given = [(node, process, endpoint) for node, process in fleet.processes() for endpoint in endpoints(process)]
    if not given:
        return skipped("no address of a store is given (MASTER_ADDR, PET_MASTER_ADDR, PET_RDZV_ENDPOINT)")
    seen = ", ".join(dict.fromkeys(f"{endpoint.variable}={endpoint.host}" for _, _, endpoint in given))
    count = count_nodes(fleet)
    if count is None or count.nodes < 2:
        return passed(f"{seen}; the job has one node" if count is not None else f"{seen}; no second node is known of")
    problems = [_loopback(fleet, node, process, endpoint, count) for node, process, endpoint in given]
    return judged(merge_equal(problem for problem in problems if problem is not None), f"{seen}; {count.source}")


def _loopback(fleet: Fleet, node: Node, process: Process, endpoint: Endpoint, count: NodeCount) -> Problem | None:
    first = _is_first(fleet, node, process)
    if first and fleet.gathered and len(fleet.nodes) > 1:
        return None
    wrong = _looks_on_itself(endpoint, known(node.names), first=first) or (
        _host_without_rank_0(fleet, process, endpoint, known(node.names)) if first is False else None
    )
    if wrong is None:
        return None
    return Problem(
        summary=f"{endpoint.variable} is {endpoint.host} in a job of {count.nodes} nodes, {wrong}",
        evidence=(count.source,),
        fix=f"export {endpoint.variable}={_right_value(fleet, endpoint)} on all nodes",
        severity=Severity.WARNING if first else None,
        ranks=ranks_of([process]),
        hosts=(node.host,),
    )


def _is_first(fleet: Fleet, node: Node, process: Process) -> bool | None:
    """Say whether a node is the one that holds rank 0; None where nothing tells."""
    if fleet.gathered and len(fleet.nodes) > 1:
        return node is fleet.nodes[0]
    numbers = [process.number(name) for name in ("GROUP_RANK", "PET_NODE_RANK", "SLURM_NODEID", "RANK")]
    return next((number == 0 for number in numbers if number is not None), None)


def _looks_on_itself(endpoint: Endpoint, names: Names | None, *, first: bool | None) -> str | None:
    """Return what is wrong with an address that every node takes for its own; None where it is none."""
    consequence = "every node but the first looks for the store on itself, and waits"
    if is_loopback(endpoint.host):
        return f"and means a different host on each: {consequence}"
    if names is None or names.master is None or first is not False or endpoint.host in _called(names):
        return None
    looked_up = names.master.addresses if names.master.name == endpoint.host else ()
    if looked_up and all(is_loopback(address) for address in looked_up):
        return f"and is looked up to {looked_up[0]} here: {consequence}"
    return None


def _host_without_rank_0(fleet: Fleet, process: Process, endpoint: Endpoint, names: Names | None) -> str | None:
    """Return what is wrong with the name of a node that is not the first.

    With c10d any node may be the host of the endpoint. Not where each node gives its own name, though, nor where the
    variables already number the ranks or nodes: then number 0 listens, and no other.
    """
    if names is None or endpoint.host not in _called(names):
        return None
    given = {
        one.host for _, other in fleet.processes() for one in endpoints(other) if one.variable == endpoint.variable
    }
    numbered = any(text_of(process, name) for name in ("RANK", "PET_NODE_RANK"))
    if len(given) == 1 and not (numbered and endpoint.variable != "PET_RDZV_ENDPOINT"):
        return None
    return "the name of a host that rank 0 is not on: ranks look for the store where nobody listens"


def _called(names: Names) -> set[str | None]:
    return {names.hostname, names.fqdn}


def _right_value(fleet: Fleet, endpoint: Endpoint) -> str:
    """Return what the variable should be: the first node's name where it is known."""
    variables = fleet.nodes[0].first.variables
    if fleet.gathered and len(fleet.nodes) > 1:
        host = fleet.nodes[0].host
    elif "SLURM_JOB_NODELIST" in variables:
        host = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    else:
        host = "NAME_OF_THE_FIRST_HOST"
    return f"{host}:{endpoint.port or 29500}" if endpoint.variable == "PET_RDZV_ENDPOINT" else host
