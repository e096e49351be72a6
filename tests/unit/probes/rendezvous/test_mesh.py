"""Nodes that are threads, each at an address of its own in 127.0.0.0/8."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.store import KeyValues
from ddpdoctor.model.reaching import Contact, Publication
from ddpdoctor.probes.rendezvous.mesh import MeshLimits, PairResults, run_mesh
from ddpdoctor.probes.rendezvous.payloads import LARGE_BYTES, PayloadLimits
from ddpdoctor.probes.rendezvous.posts import MAX_WAITING, LostTime, Posts, PostsOpen
from ddpdoctor.probes.rendezvous.visits import SOURCE_FAILS, TARGET_FAILS, Target, Visitor
from tests.scenarios.running import wait_for

PACE = PayloadLimits(stall_s=60.0, send_s=1.0)
NOT_OURS = "192.0.2.1"
"""Of no host (RFC 5737)."""


def publication(number, address=None):
    return Publication(number=number, address=f"127.0.0.{number + 1}" if address is None else address, interface="lo")


def run_nodes(publications, store=None, *, without=(), limits=None):
    """Run the nodes, save for ``without``; return what each came back with, by number."""
    store = KeyValues() if store is None else store
    numbers = [one.number for one in publications if one.number not in without]
    with ThreadPoolExecutor(len(numbers)) as pool:
        given = {
            number: pool.submit(run_mesh, Conversation(store), number, publications, limits or MeshLimits())
            for number in numbers
        }
        return {number: one.result(timeout=200) for number, one in given.items()}


def is_well(pair):
    parts = (pair.connecting, pair.small, pair.large)
    return not pair.skipped and all(part is not None and part.contact is Contact.CONNECTED for part in parts)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_pairs_of_healthy_nodes(count):
    publications = [publication(number) for number in range(count)]
    found = run_nodes(publications)

    ordered = [(source, target) for source in range(count) for target in range(count) if source != target]
    assert [(pair.source, pair.target) for pair in found[0]] == ordered
    assert all(is_well(pair) for pair in found[0])
    assert {pair.large.size_bytes for pair in found[0]} <= {LARGE_BYTES}
    for number in range(1, count):
        assert {(pair.source, pair.target) for pair in found[number]} == {p for p in ordered if p[0] == number}
    ports = [(pair.address, pair.port) for pair in found[0]]
    assert len(set(ports)) == len(ports), "each pair has a port of its own"


def test_numbers_need_not_be_places():
    publications = [publication(number) for number in (7, 2, 4)]
    found = run_nodes(publications)
    assert [(p.source, p.target) for p in found[7]] == [(7, 2), (7, 4), (2, 7), (2, 4), (4, 7), (4, 2)]
    assert all(is_well(pair) for pair in found[7])


def test_ports_of_a_range():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = taken.getsockname()[1]
        taken.listen()
        found = run_nodes([publication(0), publication(1)], limits=MeshLimits(port_range=(first, first)))[0]
    there, back = found
    assert (there.port, is_well(there)) == (first, True)
    assert back.connecting is None
    assert back.skipped == f"it cannot listen on 127.0.0.1: no port of {first}-{first} is free"


def test_sources_share_the_ports_of_a_small_range():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = run_nodes([publication(number) for number in range(4)], limits=MeshLimits(port_range=(port, port)))[0]
    assert {pair.port for pair in found} == {port}
    assert all(is_well(pair) for pair in found)


def test_an_address_that_is_not_the_nodes_own():
    found = run_nodes([publication(0), publication(1, NOT_OURS), publication(2, "")])[0]
    by_pair = {(pair.source, pair.target): pair for pair in found}
    for source in (0, 2):
        assert by_pair[source, 1].skipped.startswith(f"it cannot listen on {NOT_OURS}: ")
    assert by_pair[0, 2].skipped == by_pair[1, 2].skipped == "its own address is unknown"
    assert is_well(by_pair[1, 0])
    assert is_well(by_pair[2, 0])


def test_a_node_that_does_not_come_to_the_mesh():
    found = run_nodes([publication(n) for n in range(3)], without={2}, limits=MeshLimits(total_s=3.0))[0]
    by_pair = {(pair.source, pair.target): pair for pair in found}
    assert is_well(by_pair[0, 1])
    assert is_well(by_pair[1, 0])
    assert by_pair[0, 2].skipped == by_pair[1, 2].skipped == "it did not report its ports"
    assert by_pair[2, 0].skipped == by_pair[2, 1].skipped == "the source did not report what it saw"


def test_nobody_speaks_for_others():
    """Node 2 has reported a pair of node 1's."""
    publications = [publication(n) for n in range(3)]
    store = KeyValues()
    honest = run_nodes(publications)[0]
    Conversation(store).send("pairs/0/2", PairResults(pairs=tuple(p for p in honest if p.source == 1)))
    found = run_nodes(publications, store, without={1, 2}, limits=MeshLimits(total_s=0.3))[0]
    assert {pair.skipped for pair in found if pair.source == 1} == {"the source did not report what it saw"}


def test_garbage_from_another_node_is_not_heard():
    store = KeyValues()
    for key in ("posts", "pairs"):
        store.set(f"{key}/0/1", b"garbage")
    found = run_nodes([publication(0), publication(1), publication(2)], store, without={1})[0]
    by_pair = {(pair.source, pair.target): pair for pair in found}
    assert is_well(by_pair[0, 2])
    assert is_well(by_pair[2, 0])
    assert by_pair[0, 1].skipped == "it did not report its ports"
    assert by_pair[1, 2].skipped == "the source did not report what it saw"


def test_ports_that_are_none():
    posts = PostsOpen(ports={"0": 10**9}, ticket="no digits")
    store = KeyValues()
    Conversation(store).send("posts/0/1", posts)
    Conversation(store).send("pairs/0/1", PairResults(pairs=()))
    (pair, _) = run_mesh(Conversation(store), 0, [publication(0), publication(1)], MeshLimits())
    assert (pair.connecting.contact, pair.connecting.error) == (Contact.FAILED, "Invalid argument")


def visitor(deadline, lost=None):
    return Visitor(0, connect_s=60.0, pace=PACE, lost=lost or LostTime(limit_s=8.0), deadline=deadline)


def target_at(port, ticket=b"x" * 16):
    return Target(publication=publication(1, "127.0.0.1"), port=port, ticket=ticket, obstacle="")


FOREVER = float("inf")


@pytest.mark.parametrize(
    ("says", "contact"), [(b"SSH-2.0\r\n", Contact.FAILED), (b"", Contact.RESET)], ids=["it speaks", "it hangs up"]
)
def test_another_program_at_the_port(says, contact):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.recv(100)
                connection.sendall(says)

        thread = threading.Thread(target=answer)
        thread.start()
        (pair,) = visitor(FOREVER).visit([target_at(other.getsockname()[1])])
        thread.join(timeout=200)
    assert (pair.connecting.contact, pair.small) == (contact, None)


def test_a_port_on_which_nobody_listens():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        (pair,) = visitor(FOREVER).visit([target_at(held.getsockname()[1])])
    assert (pair.connecting.contact, pair.connecting.tries) == (Contact.REFUSED, 1)


def offer(lost=None):
    return Posts("127.0.0.1", [0], None, PACE, lost or LostTime(limit_s=8.0))


def post_of(posts):
    return target_at(posts.published.ports["0"], bytes.fromhex(posts.published.ticket))


def test_a_stranger_is_turned_away_and_the_source_is_served():
    with offer() as posts:
        port = posts.published.ports["0"]
        with socket.create_connection(("127.0.0.1", port)) as silent:
            for hello in (b"GET / HTTP/1.0\r\n" * 4, b"DDPDmesh" + b"y" * 20):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.settimeout(200)
                    stranger.sendall(hello)
                    assert hung_up(stranger)
            (pair,) = visitor(FOREVER).visit([post_of(posts)])
            assert is_well(pair)
            assert wait_for(lambda: posts.served == {0})
            silent.close()


def test_the_source_is_served_beside_more_strangers_than_there_are_places():
    with offer() as posts, contextlib.ExitStack() as opened:
        port = posts.published.ports["0"]
        for _ in range(2 * MAX_WAITING):
            stranger = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                stranger.sendall(b"x")
        (pair,) = visitor(FOREVER).visit([post_of(posts)])
        assert is_well(pair)


def hung_up(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_another_source_at_a_post_is_turned_away():
    with offer() as posts:
        other = Visitor(5, connect_s=60.0, pace=PACE, lost=LostTime(limit_s=8.0), deadline=FOREVER)
        (pair,) = other.visit([post_of(posts)])
    assert pair.connecting.contact is Contact.RESET
    assert posts.served == set()


def test_enough_payloads_have_stalled_at_the_source():
    with offer() as posts:
        (pair,) = visitor(FOREVER, LostTime(limit_s=8.0, spent_s=9.0)).visit([post_of(posts)])
    assert (pair.connecting.contact, pair.small, pair.skipped) == (Contact.CONNECTED, None, SOURCE_FAILS)


def test_enough_payloads_have_stalled_at_the_target():
    with offer(LostTime(limit_s=8.0, spent_s=9.0)) as posts:
        (pair,) = visitor(FOREVER).visit([post_of(posts)])
    assert (pair.connecting.contact, pair.small, pair.skipped) == (Contact.CONNECTED, None, TARGET_FAILS)


def test_no_time_is_left():
    with offer() as posts:
        (pair,) = visitor(0.0).visit([post_of(posts)])
    assert (pair.small, pair.skipped) == (None, "the time for the mesh was over")
