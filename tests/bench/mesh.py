"""How long the mesh takes: 2 to 16 hosts in network namespaces, each with a process of its own.

    sudo python -m tests.bench.mesh [HOSTS …]

All hosts share this machine's processors: with more hosts than processors it is these that are measured. What the
network alone would take is in the lines for a rate limit.
"""

import json
import subprocess
import sys
import time
from contextlib import closing, nullcontext

from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.store import Store, wait_for
from ddpdoctor.exchange.wire import open_client
from ddpdoctor.model.codec import encode
from ddpdoctor.model.launch import Publication
from ddpdoctor.probes.mesh import MeshLimits, run_mesh
from tests.scenarios.hosts import Hosts, lent_hosts

PORT, TOKEN = 29600, b"bench"
LIMIT_S = 120
RATES = (None, "1gbit", "100mbit")


def main() -> None:
    counts = [int(one) for one in sys.argv[1:]] or [2, 4, 8, 16]
    for count in counts:
        with lent_hosts(count) as hosts:
            for rate in RATES:
                _limit(hosts, rate)
                seconds, pairs = run(hosts)
                print(f"{count:3} hosts, {rate or 'no limit':>8}: {seconds:6.2f} s, {_summary(pairs)}", flush=True)


def run(hosts: Hosts) -> tuple[float, list[dict[str, object]]]:
    """Run the mesh on all hosts; return the seconds of the slowest and the pairs as the first host has them."""
    addresses = ",".join(hosts.address(number) for number in range(hosts.count))
    command = (sys.executable, "-m", "tests.bench.mesh", "member", addresses)
    members = [hosts.start(number, *command, str(number)) for number in range(hosts.count)]
    seconds, pairs = [], []
    for number, member in enumerate(members):
        stdout, stderr = member.communicate(timeout=LIMIT_S)
        assert member.returncode == 0, stderr
        reported = json.loads(stdout)
        seconds.append(reported["seconds"])
        pairs = reported["pairs"] if number == 0 else pairs
    return max(seconds), pairs


def _limit(hosts: Hosts, rate: str | None) -> None:
    for number in range(hosts.count if rate else 0):
        where = ("-n", hosts.namespace(number), "qdisc", "replace", "dev", "eth0", "root")
        limit = ("tbf", "rate", str(rate), "burst", "128kb", "latency", "50ms")
        subprocess.run(["tc", *where, *limit], check=True, timeout=20)


def _summary(pairs: list[dict[str, object]]) -> str:
    well = [pair for pair in pairs if pair["large"] and pair["large"]["contact"] == "connected"]  # type: ignore[index]
    rates = sorted(pair["large"]["size_bytes"] * 8e-9 / pair["large"]["duration_s"] for pair in well)  # type: ignore[index]
    median = rates[len(rates) // 2] if rates else 0.0
    return f"{len(well)} of {len(pairs)} pairs well, a payload at {median:.2f} Gbit/s in the median"


def _member(addresses: list[str], number: int) -> None:
    """Be one host's process: wait for the others, run the mesh, say what it took."""
    server = Server(PORT, TOKEN) if number == 0 else None
    serving = closing(server) if server is not None else nullcontext()
    with serving, closing(open_client([addresses[0]], PORT, TOKEN, LIMIT_S)) as store:
        _meet(store, len(addresses))
        started = time.monotonic()
        pairs = run_mesh(Conversation(store), number, _publications(addresses), MeshLimits())
        print(json.dumps({"seconds": time.monotonic() - started, "pairs": [encode(pair) for pair in pairs]}))
        _see_off(store, len(addresses), serves=server is not None)


def _publications(addresses: list[str]) -> list[Publication]:
    return [Publication(number=n, address=address, interface="eth0") for n, address in enumerate(addresses)]


def _meet(store: Store, count: int) -> None:
    if store.add("come", 1) == count:
        store.set("all", b"")
    assert wait_for(lambda: store.get("all"), LIMIT_S) is not None


def _see_off(store: Store, count: int, *, serves: bool) -> None:
    store.add("gone", 1)
    while serves and store.add("gone", 0) < count:
        time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1:2] == ["member"]:
        _member(sys.argv[2].split(","), int(sys.argv[3]))
    else:
        main()
