"""DD116: an HTTP proxy between the ranks and the etcd server of their rendezvous."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rendezvous import parse_endpoint
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.variable_flaws import show

if TYPE_CHECKING:
    from ddpdoctor.model.node import Node, NodeProcess

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@rule(
    "DD116", "proxy-env", Severity.INFO, "A proxy is between the ranks and their etcd rendezvous",
    group=CheckGroup.VARIABLES, needs=(),
    reads="http_proxy, https_proxy, no_proxy, PET_RDZV_BACKEND, PET_RDZV_ENDPOINT",
)  # fmt: skip
def check_proxy_env(node: Node) -> Answer:
    """Report an HTTP proxy whose exceptions do not name the host of the etcd rendezvous."""
    process = node.first
    if not process.variables.get("PET_RDZV_BACKEND", "").startswith("etcd"):
        return skipped("PET_RDZV_BACKEND is not etcd, and no other rendezvous uses HTTP")
    proxies = [name for name in PROXIES if process.variables.get(name)]
    host = _rendezvous_host(process)
    if not proxies or not host:
        return judged([], "no proxy is set" if host else "no rendezvous host is set")
    exceptions = ",".join(process.variables.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    if _is_excepted(host, exceptions):
        return judged([], f"no_proxy includes {host}")
    problem = Problem(
        summary=f"{proxies[0]} is set, but no_proxy does not include {host}, the etcd rendezvous host",
        evidence=(f"{', '.join(proxies)} set, no_proxy={show(process.variables.get('no_proxy', ''))}",),
        fix=f'export no_proxy="${{no_proxy:+$no_proxy,}}{host}"; export NO_PROXY="$no_proxy"',
    )
    return judged([problem], f"{proxies[0]} without an exception for {host}")


def _rendezvous_host(process: NodeProcess) -> str:
    for name in ("PET_RDZV_ENDPOINT", "MASTER_ADDR"):
        endpoint = parse_endpoint(process.variables.get(name, ""), name)
        if endpoint is not None:
            return endpoint.host
    return ""


def _is_excepted(host: str, exceptions: str) -> bool:
    domains = [domain.strip().lower().lstrip(".") for domain in exceptions.split(",") if domain.strip()]
    return any(domain == "*" or host.lower() == domain or host.lower().endswith(f".{domain}") for domain in domains)
