"""Says in sentences how NCCL connects the ranks of a job, as its log (NCCL_DEBUG=INFO) shows."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.model.words import count_of, grouped, name_list

from .connections import NcclJob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .connections import RankLink
    from .state import RunState

SLOW_START_S = 30.0
"""From here on the set-up of a communicator is worth a word: the facts' figure."""
MOST_PAIRS = 4
MOST_ALGORITHMS = 4
DISABLING = {
    "NCCL_P2P_DISABLE": "no direct data exchange between the GPUs of a host",
    "NCCL_SHM_DISABLE": "no shared memory between the processes of a host",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_IGNORE_NET_MISMATCH": "hosts with different networks are accepted, but may hang",
}
"""Variables that switch something off when they are set, and what."""
ENABLING = {
    "NCCL_NVLS_ENABLE": "NVLink SHARP is off",
    "NCCL_DMABUF_ENABLE": "adapters do not use DMA-BUF for GPU memory",
    "NCCL_CUMEM_ENABLE": "cuMem does not allocate the buffers",
}
"""Variables that switch something off when they are 0."""
OFF = {"", "0"}
_NUMBER = re.compile(r"/\d+(?:\(\d+\))?(?=/|$)")


def explain_nccl(state: RunState) -> Iterator[str]:
    """Yield what NCCL's log says of network, connections, algorithms, settings and start."""
    job = NcclJob(state)
    if not job.processes:
        return
    yield from _networks(job)
    ways = grouped((link.edge.way, link) for link in job.links)
    yield from (_way_words(links) for links in ways.values())
    yield from _counts(job)
    yield from _settings(job)
    yield from _start(job)


def _networks(job: NcclJob) -> Iterator[str]:
    for network, hosts in grouped((one.network, one.who.host) for one in job.processes if one.network).items():
        words = "TCP (Socket)" if network == "Socket" else network
        adapters = sorted({name for one in job.processes if one.network == network for name in one.adapters})
        found = f"; it found the adapters {name_list(adapters)}" if adapters else ""
        yield f"NCCL uses the network {words} on {name_list(list(dict.fromkeys(hosts)))}{found}"


def _way_words(links: list[RankLink]) -> str:
    """Say which pairs of ranks have connections of one kind."""
    pairs = sorted({link.pair for link in links})
    texts = list(dict.fromkeys(_NUMBER.sub("", link.edge.text) for link in links))
    channels = sorted({link.edge.channels for link in links})
    each = f"{channels[0]} to {channels[-1]} channels" if len(channels) > 1 else count_of(channels[0], "channel")
    shown = name_list([f"{a}-{b}" for a, b in pairs], MOST_PAIRS)
    way = links[0].edge.way.value
    return f"{count_of(len(pairs), 'pair')} of ranks {way} ({name_list(texts)}): {shown}, {each} each way"


def _counts(job: NcclJob) -> Iterator[str]:
    channels = sorted({one.channels for one in job.processes if one.channels is not None})
    if channels:
        yield f"NCCL uses {' or '.join(map(str, channels))} channels for collectives"
    chosen: Counter[str] = Counter()
    for one in job.processes:
        chosen.update(one.algorithms)
    if chosen:
        most = [f"{name} ({count_of(count, 'call')})" for name, count in chosen.most_common(MOST_ALGORITHMS)]
        yield f"NCCL's algorithms and protocols: {', '.join(most)}"
    nvls = {one.nvls for one in job.processes if one.nvls is not None}
    if len(nvls) == 1:
        yield f"NVLS (reductions in the NVSwitch) is {'available' if True in nvls else 'not available'}"


def _settings(job: NcclJob) -> Iterator[str]:
    for name, meaning in (DISABLING | ENABLING).items():
        value = job.setting(name)
        if value is not None and (value in OFF) is (name in ENABLING):
            yield f"{name}={value}: {meaning}"


def _start(job: NcclJob) -> Iterator[str]:
    slowest = max(job.processes, key=lambda one: one.init_s or 0.0)
    if slowest.init_s:
        late = ", which delays only the start" if slowest.init_s > SLOW_START_S else ""
        yield f"setting up a communicator took up to {slowest.init_s:.1f} s{late}"
