"""Where a node knocks when others are missing, and what it keeps of that."""

import socket

import pytest

from ddpdoctor.collect.run.evidence import load
from ddpdoctor.launch.command.placement import Placement
from ddpdoctor.launch.watching.reached import note_reached, places_to_try, try_places
from ddpdoctor.model.findings import Confidence, Finding, Judgment, Severity
from ddpdoctor.model.nodes import NodeSeen, NodesSeen, Presence
from ddpdoctor.model.reaching import Connecting, Contact
from ddpdoctor.model.run import REACHED_NAME as FILE

HERE, SILENT, ABSENT = Presence.HERE, Presence.SILENT, Presence.ABSENT
PLACEMENT = Placement(number=0, expected=3, port=29501, store=("node0", 29500))


def seen(*presences, own=0, alone=False):
    nodes = tuple(NodeSeen(number=n, host=f"node{n}", presence=presence) for n, presence in enumerate(presences))
    return NodesSeen(expected=len(nodes), own=own, nodes=nodes, alone_since_ns=1 if alone else None)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        (seen(HERE, HERE, HERE), []),
        (seen(HERE, SILENT, ABSENT), ["node1", "node2"]),
        (seen(SILENT, HERE, HERE, own=2, alone=True), ["node0", "node1"]),
        (seen(SILENT, HERE, HERE, own=2), ["node0"]),
    ],
)
def test_the_store_and_the_hosts_of_which_nothing_is_heard(nodes, hosts):
    assert places_to_try(nodes, PLACEMENT) == (("node0", 29500), *((host, 29501) for host in hosts))


def test_hosts_without_a_name_and_the_own_one_are_left_out():
    nodes = (
        NodeSeen(number=0, host="node0", presence=HERE),
        NodeSeen(number=1, host="node0", presence=SILENT),
        NodeSeen(number=2, host="", presence=ABSENT),
    )
    assert places_to_try(NodesSeen(expected=3, own=0, nodes=nodes), Placement(port=29501)) == ()


def test_what_was_tried_can_be_read_again(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        up, down = server.getsockname()[1], other.getsockname()[1]
        other.close()
        assert try_places(tmp_path, (("127.0.0.1", up), ("127.0.0.1", down), ("no-such-name.invalid", 1)))
        assert [attempt.contact for attempt in load(tuple[Connecting, ...], tmp_path / FILE)] == [
            Contact.CONNECTED, Contact.REFUSED, Contact.UNRESOLVED,
        ]  # fmt: skip
        assert not try_places(tmp_path, (("127.0.0.1", up),)), "a moment ago"


@pytest.mark.parametrize("text", ["", "{", '[{"host": 1}]', '{"host": "node0"}', "[" * 100_000])
def test_a_damaged_file_holds_nothing(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert load(tuple[Connecting, ...], tmp_path / FILE) in {None, ()}


@pytest.mark.parametrize(("code", "is_tried"), [("DD607", True), ("DD605", True), ("DD601", False)])
def test_nobody_knocks_unless_a_node_may_be_missing(tmp_path, code, is_tried):
    found = Finding(code=code, kind="any", severity=Severity.ERROR, confidence=Confidence.HIGH, summary="")
    judgment = Judgment(findings=(found,), checks=(), certain=False)
    placement = Placement(port=1, store=("127.0.0.1", 1))
    assert note_reached(tmp_path, judgment, seen(HERE, HERE), placement) is is_tried
    assert bool(load(tuple[Connecting, ...], tmp_path / FILE)) is is_tried
