"""How long it takes from the first alarm to the judgment of a job on many nodes: python -m tests.bench.nodes [NODES]

64 nodes of 8 ranks, 2,000 records each, by default. Their run folders are made beforehand. The first node is the real
one, in this process; the others are real members in a second process, which packs for all of them, one after the other,
what as many machines would pack at the same time. They meet over the loopback interface. On a busy machine the
processor times are what tells.

Also printed: what all beats of one node take in a second, with the headers of TCP, as the kernel counts them on the
loopback interface; where other programs use that too, in a network namespace of its own:

    sudo unshare -n sh -c "ip link set lo up && python -m tests.bench.nodes"
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddpdoctor.diagnose.job import judge_folder
from ddpdoctor.exchange.meeting import OwnPort
from ddpdoctor.launch.first_node import FirstNode
from ddpdoctor.launch.hang import save_nodes
from ddpdoctor.launch.node_messages import pack_folder
from ddpdoctor.launch.other_node import OtherNode
from ddpdoctor.launch.placement import Placement
from tests.synthetic import SITUATIONS, Job, steps_for, write_hosts

NODES, RANKS_A_NODE, RECORDS = 64, 8, 2000
SITUATION = "stuck"
LIMIT_S = 60.0
BEATS_FOR_S = 10.0


def placement(number: int, nodes: int, port: int) -> Placement:
    """Return where a member stands."""
    return Placement(number=number, expected=nodes, most=nodes, hosts=("127.0.0.1",), port=port, one_host=True)


def play_members(port: int, folders: list[Path]) -> None:
    """Be all members but the first, until standard input ends: each sends its folder when it is asked."""
    others = []
    for number, _ in enumerate(folders[1:], start=1):
        where = placement(number, len(folders), port)
        others.append(OtherNode(where, f"node{number}", (OwnPort(where.hosts, port),)))
        others[-1].start()
    print("started", flush=True)
    packing_s, answered = 0.0, 0
    while answered < len(others):
        for other, folder in zip(others, folders[1:], strict=True):
            if request := other.request:
                began = time.thread_time()
                packed = pack_folder(folder)
                packing_s += time.thread_time() - began
                other.answer(request, packed, moved=False)
                answered += 1
        time.sleep(0.01)
    print(f"{packing_s:.2f}", flush=True)
    sys.stdin.read()


def wait_until(is_so, what: str) -> None:
    """Wait for something, for ``LIMIT_S`` at most."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {LIMIT_S:g} s")
        time.sleep(0.01)


def measure(folder: Path, nodes: int, situation: str) -> None:
    """Print what one situation takes, from the request for evidence to the judgment."""
    world = nodes * RANKS_A_NODE
    folders = write_hosts(folder, Job(world=world, steps=steps_for(world, RECORDS), situation=situation), nodes)
    first = FirstNode(placement(0, nodes, 0), "node0", folders[0])
    first.serve()
    port = first._meeting.port
    command = [sys.executable, "-m", "tests.bench.nodes", "members", str(port), *map(str, folders)]
    members = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert members.stdout is not None
    members.stdout.readline()
    wait_until(lambda: len(first.members._greetings) == nodes - 1, "all members are here")
    if situation == SITUATION:
        print_beats(nodes)
    began, began_cpu = time.perf_counter(), time.process_time()
    first.ask()
    wait_until(lambda: len(first.members._received) == nodes - 1, "all members have answered")
    gathered = time.perf_counter()
    packing_s = float(members.stdout.readline())
    seen = first.save(folders[0])
    save_nodes(folders[0], seen)
    saved = time.perf_counter()
    judgment = judge_folder(folders[0])
    judged, judged_cpu = time.perf_counter(), time.process_time()
    found = (
        ", ".join(f"{one.kind} {list(one.hosts[:4])} {list(one.ranks[:4])}" for one in judgment.findings[:1])
        or "nothing"
    )
    print(
        f"{nodes} nodes of {RANKS_A_NODE} ranks, {situation}: {judged - began:.2f} s in all: gathered "
        f"{gathered - began:.2f} (for which all others packed {packing_s:.2f} s on one core), "
        f"unpacked {saved - gathered:.2f}, "
        f"judged {judged - saved:.2f}; the first node's processor time {judged_cpu - began_cpu:.2f} s; "
        f"{sum(node.gathered for node in seen.nodes)} nodes gathered; {found}",
        flush=True,
    )
    members.kill()
    members.wait()
    first.close()


def print_beats(nodes: int) -> None:
    """Print what a node's beats take, by the bytes that went over the loopback interface, which counts each once."""
    before = read_loopback()
    time.sleep(BEATS_FOR_S)
    now = read_loopback()
    each = (now - before) / (nodes - 1) / BEATS_FOR_S
    print(f"beats and what answers them: {each:.0f} bytes a second and node, with all headers", flush=True)


def read_loopback() -> int:
    """Return the bytes that the loopback interface has taken so far."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.lstrip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


def main() -> None:
    """Print the figures."""
    if sys.argv[1:2] == ["members"]:
        play_members(int(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
        return
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else NODES
    for situation in SITUATIONS:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), nodes, situation)


if __name__ == "__main__":
    main()
