"""DD129 and DD130: clocks, and Python paths, systems and host files that should be the same on all nodes."""

from __future__ import annotations

import zlib
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import name_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.majority import compare_nodes, describe, disagreement
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Fleet, Node

    Offsets = list[tuple[Node, float]]  # nodes, and the seconds by which their clocks are ahead of rank 0's

# The c10d rendezvous sends a keep-alive every 5 s and takes a node for dead after 3 missing ones. It compares wall
# clocks of two hosts (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, _sanitize). Our test with --nnodes 2:
# at 16 s off the first node ran alone with WORLD_SIZE=1 and exit status 0; at 12 s off nothing happened.
FAR_OFF_S = 15.0
OFF_S = 1.0  # our choice: beyond it, logs of two hosts can no longer be read side by side


@rule(
    "DD129", "clock", Severity.WARNING, "The clocks of the nodes differ", group=CheckGroup.LIMITS, needs=("clock",),
    reads="the clock of every node against rank 0's, adjtimex",
)  # fmt: skip
def check_clock(fleet: Fleet) -> Answer:
    """Report nodes whose wall clock differs from the others."""
    read = fleet.each(lambda node: node.clock)
    several = len(fleet.nodes) > 1 or (fleet.nnodes or 1) > 1
    loose = [node for node, _ in read if _is_loose(node)]
    if not several:
        words = {True: "yes", False: "no", None: "not known"}
        return passed(f"only one node; its kernel reports clock synchronization: {(words[read[0][1].synchronized])}")
    # Rank 0's own node gets 0 if another node was compared with it.
    offsets = [(node, clock.offset_s) for node, clock in read if clock.offset_s is not None]
    if offsets and read[0][1].offset_s is None:
        offsets.insert(0, (read[0][0], 0.0))
    if len(offsets) < 2:
        return judged(_unsynchronized(loose, None), "the clocks could not be compared")
    values = [value for _, value in offsets]
    spread = max(values) - min(values)
    problems = [*_who_is_off(offsets)] or _unsynchronized(loose, spread)
    return judged(problems, f"{len(offsets)} clocks within {spread:.2f} s")


def _who_is_off(offsets: Offsets) -> Iterator[Problem]:
    """Yield the hosts that differ from the median: with two hosts, the one whose clock is not synchronized, or both."""
    if len(offsets) == 2:
        behind, ahead = sorted(offsets, key=lambda offset: offset[1])
        apart, sure = ahead[1] - behind[1], Confidence.MEDIUM
        off = [(node, sign * apart) for (node, _), sign in ((ahead, 1), (behind, -1)) if apart > OFF_S]
        loose = [(node, value) for node, value in off if _is_loose(node)]
        off = loose if len(loose) == 1 else off
    else:
        middle, sure = median(value for _, value in offsets), Confidence.HIGH
        off = [(node, value - middle) for node, value in offsets if abs(value - middle) > OFF_S]
    far = [(node, value) for node, value in off if abs(value) >= FAR_OFF_S]
    for those, severity, consequence in (
        (far, Severity.ERROR, "at 15 s or more, torchrun's rendezvous treats live nodes as dead"),
        ([pair for pair in off if pair not in far], Severity.WARNING, "the log times of two hosts do not match"),
    ):
        if not those:
            continue
        worst_first = sorted(those, key=lambda pair: -abs(pair[1]))
        worst, evidence = worst_first[0][1], tuple(f"{node.host}: {value:+.1f} s" for node, value in worst_first[:8])
        # Two nodes may have the same name, as containers on one host do.
        hosts = tuple(dict.fromkeys(node.host for node, _ in worst_first))
        who = f"clock of {hosts[0]} is" if len(hosts) == 1 else f"clocks of {name_list(hosts)} are up to"
        what = f"The {who} {abs(worst):.1f} s {'ahead of' if worst > 0 else 'behind'} the others"
        if len(offsets) == len(those) == 2:
            what = f"The clock of {those[0][0].host} is {worst:.1f} s ahead of the clock of {those[1][0].host}"
            hosts, evidence = tuple(dict.fromkeys(node.host for node, _ in offsets)), ()
            sure = Confidence.LOW
        summary = f"{what}: {consequence}"
        fix = "sudo chronyc makestep, or sudo systemctl restart systemd-timesyncd"
        yield Problem(summary=summary, evidence=evidence, fix=fix, severity=severity, confidence=sure, hosts=hosts)


def _is_loose(node: Node) -> bool:
    clock = known(node.clock)
    return clock is not None and clock.synchronized is False


def _unsynchronized(loose: list[Node], spread: float | None) -> Iterator[Problem]:
    if not loose:
        return
    now = "the clocks could not be compared" if spread is None else f"they currently agree within {spread:.2f} s"
    hosts = tuple(dict.fromkeys(node.host for node in loose))
    summary = f"The clock of {name_list(hosts)} is not synchronized, {'and' if spread is None else 'but'} {now}"
    fix = "sudo timedatectl set-ntp true"
    yield Problem(summary=summary, fix=fix, severity=Severity.WARNING if spread is None else Severity.INFO, hosts=hosts)


@rule(
    "DD130", "rootfs-same", Severity.INFO, "Nodes have different Pythons, operating systems or host files",
    group=CheckGroup.VERSIONS, needs=("software", "torch"),
    reads="the path of Python and of torch, os-release, the entries of /etc/hosts for other hosts",
)  # fmt: skip
def check_rootfs_same(fleet: Fleet) -> Answer:
    """Report nodes that are set up differently from the others."""
    if len(fleet.nodes) < 2:
        return skipped("only one node: nothing to compare")
    software = fleet.each(lambda node: node.software)
    torch = [(node, build) for node in fleet.nodes if (build := known(node.torch)) is not None]
    # Entries of /etc/hosts without the compared nodes' lines: many hosts list only themselves.
    own = frozenset(line for _, system in software for line in system.hosts_own)
    others = [
        (node, " ".join(line for line in system.hosts_lines if line not in own))
        for node, system in software
        if system.hosts_lines is not None
    ]
    splits = {
        "Python": compare_nodes((node, system.executable) for node, system in software),
        "torch": compare_nodes((node, build.path) for node, build in torch),
        "system": compare_nodes((node, system.os_name or None) for node, system in software),
        "/etc/hosts (digest)": compare_nodes((node, f"{zlib.crc32(lines.encode()):08x}") for node, lines in others),
    }
    fix = "set up the nodes the same way, or run them from one container image"
    problems = [disagreement(split, describe(split, name), fix) for name, split in splits.items() if split is not None]
    return judged(problems, f"paths and systems of {len(software)} nodes")
