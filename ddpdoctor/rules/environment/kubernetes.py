"""DD239: whether a Kubernetes pod is set up for the job that runs in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known
from ddpdoctor.model.rendezvous import by_torchrun, is_loopback, nodes_range, text_of
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.environment.processes import ranks_of, show_variables
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.network import Names, Network
    from ddpdoctor.model.node import Node, NodeProcess

HOST_INTERFACES = ("cni", "cali", "cilium", "flannel", "kube-ipvs", "lxc", "nodelocaldns")
"""Interfaces that network plugins create on the machine itself, not inside its pods."""
MANY_HOST_INTERFACES = 2
"""Our choice: a single such name may be an interface of the pod. A machine has the plugin's own and one for each
pod."""
_SHOWN = (
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "GROUP_WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "MASTER_ADDR",
)  # fmt: skip


@rule(
    "DD239", "k8s", Severity.WARNING, "The Kubernetes pod does not match its job",
    group=CheckGroup.LAUNCH, needs=("names", "network"),
    reads="KUBERNETES_SERVICE_HOST, PET_*, MASTER_ADDR, getaddrinfo, interfaces, /proc/net/tcp",
)  # fmt: skip
def check_k8s(node: Node) -> Answer:
    """Report pods whose options are overridden, whose names do not resolve, or whose network breaks the job."""
    if not any(text_of(process, "KUBERNETES_SERVICE_HOST") for process in node.processes):
        return skipped("this is not a Kubernetes pod")
    names, network = known(node.names), known(node.network)
    problems = [*_overruled(node), *_unresolved(node, names), *_proxied(network), *_host_network(names, network)]
    return judged(problems, show_variables(node.first, _SHOWN) or "a pod without an operator's variables")


def _overruled(node: Node) -> Iterator[Problem]:
    process = node.first
    if not by_torchrun(process):
        return
    groups, asked = process.number("GROUP_WORLD_SIZE"), nodes_range(text_of(process, "PET_NNODES"))
    ranks = ranks_of(node.processes)
    if groups is not None and asked is not None and not asked[0] <= groups <= asked[1]:
        alone = groups == 1 and asked[1] > 1
        yield Problem(
            summary=f"the operator set PET_NNODES={text_of(process, 'PET_NNODES')}, but torchrun counts {groups}: "
            + ("each pod trains alone" if alone else "its command line overrules the operator"),
            evidence=(f"GROUP_WORLD_SIZE is {groups}",),
            fix="remove --nnodes and --standalone from torchrun's command, so that it uses PET_NNODES",
            ranks=ranks,
        )
    local, wanted = process.number("LOCAL_WORLD_SIZE"), process.number("PET_NPROC_PER_NODE")
    if local is not None and wanted is not None and local != wanted:
        yield Problem(
            summary=f"the operator set PET_NPROC_PER_NODE={wanted}, but torchrun started {local} on this pod",
            evidence=(f"LOCAL_WORLD_SIZE is {local}",),
            fix="remove --nproc-per-node from torchrun's command, or set the job's numProcPerNode (nprocPerNode) to "
            f"{local}",
            ranks=ranks,
        )


def _unresolved(node: Node, names: Names | None) -> Iterator[Problem]:
    if names is None or names.master is None or names.master.error is None or is_loopback(names.master.name):
        return
    service = names.master.name.partition(".")[2].partition(".")[0] or names.master.name
    patch = '{"spec":{"publishNotReadyAddresses":true}}'
    yield Problem(
        summary=f"the master's name {names.master.name} does not resolve in this pod: no service publishes it",
        evidence=(names.master.error, *_given_by(node.first)),
        fix=f"kubectl patch service {service} -p '{patch}'",
    )


def _given_by(process: NodeProcess) -> Iterator[str]:
    for name in ("MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"):
        if text_of(process, name):
            yield f"{name}={text_of(process, name)}"
            return


def _proxied(network: Network | None) -> Iterator[Problem]:
    if network is not None and network.mesh_proxy:
        yield Problem(
            summary="Istio's proxy intercepts all connections of this pod: ranks connect but then hang",
            evidence=("Istio's proxy listens on ports 15001 and 15006",),
            fix='give the pods the annotation sidecar.istio.io/inject: "false"',
        )


def _host_network(names: Names | None, network: Network | None) -> Iterator[Problem]:
    if names is None or network is None or not names.own.addresses:
        return
    hosts = [one.name for one in network.interfaces if one.name.startswith(HOST_INTERFACES)]
    if len(hosts) >= MANY_HOST_INTERFACES and all(is_loopback(address) for address in names.own.addresses):
        yield Problem(
            summary="the pod uses the host's network and /etc/hosts, where the host name is loopback: Gloo sends the "
            "other ranks a loopback address",
            evidence=(f"interfaces: {', '.join(hosts[:4])}", f"its name has the address {names.own.addresses[0]}"),
            fix="fix /etc/hosts on the host, or export GLOO_SOCKET_IFNAME="
            f"{network.default_interface or 'INTERFACE'} in the pod",
        )
