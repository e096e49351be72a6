"""Reads whether the proxy of a service mesh stands between this pod and the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.collect.system import System

ENVOY_PORTS = frozenset({15001, 15006})
"""What Istio's proxy listens on for outgoing and incoming connections
(https://istio.io/latest/docs/ops/deployment/application-requirements/). A pod's containers share their network, so that
its sockets are seen from the others, where its processes are not."""
_LISTEN = "0A"


def has_mesh_proxy(system: System) -> bool:
    """Say whether something listens on both ports of Istio's proxy; false where sockets cannot be seen."""
    return set(_listened_on(system)) >= ENVOY_PORTS


def _listened_on(system: System) -> Iterator[int]:
    """Yield every local port of /proc/net/tcp that is listened on."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in system.text_or(table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == _LISTEN:
                yield int(fields[1].rpartition(":")[2], 16)
