"""Nodes that knock at each other: contacts, payloads, rounds and the mesh."""

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.reach import contact_of
from ddpdoctor.exchange.store import KeyValues
from ddpdoctor.model.launch import Connecting, Contact, Publication, Transfer
from ddpdoctor.probes.mesh import (
    BLOCK,
    MAX_WAITING,
    SOURCE_FAILS,
    TARGET_FAILS,
    LostTime,
    MeshLimits,
    PairResults,
    Posts,
    PostsOpen,
    Target,
    Visitor,
    blocks_of,
    connect_all,
    partners_of,
    run_mesh,
)
from ddpdoctor.probes.payloads import (
    LARGE_BYTES,
    NUMBER,
    PART_BYTES,
    Damaged,
    PayloadLimits,
    TargetBusy,
    greet,
    rate_of,
    read_tcp_counts,
    send_large,
    send_payload,
    serve_payloads,
)
from ddpdoctor.probes.store import NoTorch, StartProcess, TorchError, TorchProcess, is_own, knock, more_telling
from tests.golden import Cases, words
from tests.scenarios.running import wait_for

CASES = Cases(__name__)
test_kept = CASES.test()


def telling(contacts):
    """Return the contact of that of two looks which says more; "-" is no look."""
    looks = [() if one == "-" else seen(Contact(one)) for one in contacts.split()]
    return more_telling(*looks)[0].contact


test_words = words(
    __name__,
    contact_of=lambda name: contact_of(
        TimeoutError() if name == "timeout" else OSError(getattr(errno, name, name), "")
    ),
    more_telling=telling,
)


def test_many_at_a_time_each_with_its_own_end():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        ports = [listener.getsockname()[1], held.getsockname()[1]]
        attempts = connect_all([("127.0.0.1", ports[0]), ("127.0.0.1", ports[1]), ("no number", 1)], 2.0)
        assert [attempt.seen.contact for attempt in attempts] == [Contact.CONNECTED, Contact.REFUSED, Contact.FAILED]
        assert [attempt.connection is None for attempt in attempts] == [False, True, True]
        attempts[0].connection.close()


def test_no_answer_in_time():
    """A listener whose queue is full: the kernel drops further first packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = listener.getsockname()
        with socket.create_connection(place):
            (attempt,) = connect_all([place], 0.2)
    assert (attempt.seen.contact, attempt.seen.tries) == (Contact.NO_ANSWER, 1)
    assert attempt.seen.error == "no answer to 1 first packets"
    assert attempt.pending == []


# Nodes that are threads, each at an address of its own in 127.0.0.0/8.


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


@pytest.mark.parametrize("numbers", [(0,), (0, 1), range(5), (7, 2, 4)])
def test_all_pairs_of_healthy_nodes(numbers):
    """Numbers need not be places."""
    found = run_nodes([publication(number) for number in numbers])
    first = numbers[0]
    ordered = [(source, target) for source in numbers for target in numbers if source != target]
    assert [(pair.source, pair.target) for pair in found[first]] == ordered
    assert all(is_well(pair) for pair in found[first])
    assert {pair.large.size_bytes for pair in found[first]} <= {LARGE_BYTES}
    for number in numbers[1:]:
        assert {(pair.source, pair.target) for pair in found[number]} == {p for p in ordered if p[0] == number}
    ports = [(pair.address, pair.port) for pair in found[first]]
    assert len(set(ports)) == len(ports), "each pair has a port of its own"


def told(pairs):
    """Return what became of each pair."""
    return {f"{one.source} to {one.target}": "well" if is_well(one) else one.skipped for one in pairs}


@CASES
def meshes_that_lack_something():
    """Node 1 has a post of garbage, an address of no host, or does not come; two share a range of one port."""
    three = [publication(number) for number in range(3)]
    nowhere = [three[0], publication(1, NOT_OURS), publication(2, "")]
    garbage = KeyValues()
    for key in ("posts", "pairs"):
        garbage.set(f"{key}/0/1", b"garbage")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_range = told(run_nodes(three[:2], limits=MeshLimits(port_range=(port, port)))[0])
    return {
        "a port that is taken where the first node is": {
            pair: said.replace(str(port), "PORT") for pair, said in in_range.items()
        },
        "addresses of no host and of none": told(run_nodes(nowhere)[0]),
        "one does not come": told(run_nodes(three, without={1}, limits=MeshLimits(total_s=3.0))[0]),
        "garbage": told(run_nodes(three, garbage, without={1})[0]),
    }


def test_sources_share_the_ports_of_a_small_range():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = run_nodes([publication(number) for number in range(4)], limits=MeshLimits(port_range=(port, port)))[0]
    assert {pair.port for pair in found} == {port}
    assert all(is_well(pair) for pair in found)


def test_nobody_speaks_for_others():
    """Node 2 has reported a pair of node 1's."""
    publications = [publication(n) for n in range(3)]
    store = KeyValues()
    honest = run_nodes(publications)[0]
    Conversation(store).send("pairs/0/2", PairResults(pairs=tuple(p for p in honest if p.source == 1)))
    found = run_nodes(publications, store, without={1, 2}, limits=MeshLimits(total_s=0.3))[0]
    assert {pair.skipped for pair in found if pair.source == 1} == {"the source did not report its results"}


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
    (pair,) = visitor(FOREVER).visit([target_at(closed_port())])
    assert (pair.connecting.contact, pair.connecting.tries) == (Contact.REFUSED, 1)


def offer(lost=None):
    return Posts("127.0.0.1", [0], None, PACE, lost or LostTime(limit_s=8.0))


def post_of(posts):
    return target_at(posts.published.ports["0"], bytes.fromhex(posts.published.ticket))


def test_the_source_is_served_beside_strangers_which_are_turned_away():
    """One says nothing, and there are more of them than there are places."""
    with offer() as posts, contextlib.ExitStack() as opened:
        port = posts.published.ports["0"]
        for hello in (b"GET / HTTP/1.0\r\n" * 4, b"DDPDmesh" + b"y" * 20):
            with socket.create_connection(("127.0.0.1", port), timeout=200) as stranger:
                stranger.sendall(hello)
                assert hung_up(stranger)
        for number in range(2 * MAX_WAITING):
            stranger = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                stranger.sendall(b"x" * bool(number))
        (pair,) = visitor(FOREVER).visit([post_of(posts)])
        assert is_well(pair)
        assert wait_for(lambda: posts.served == {0})


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


STALLED = LostTime(limit_s=8.0, spent_s=9.0)


@pytest.mark.parametrize(
    ("at_target", "of_source", "contact", "skipped"),
    [
        (None, (FOREVER, STALLED), Contact.CONNECTED, SOURCE_FAILS),
        (STALLED, (FOREVER,), Contact.CONNECTED, TARGET_FAILS),
        (None, (0.0,), None, "the time for the mesh ran out"),
    ],
)  # fmt: skip
def test_where_enough_payloads_have_stalled_or_no_time_is_left_none_is_sent(at_target, of_source, contact, skipped):
    with offer(at_target) as posts:
        (pair,) = visitor(*of_source).visit([post_of(posts)])
    assert (pair.small, pair.skipped) == (None, skipped)
    assert contact is None or pair.connecting.contact is contact


PACE_PAYLOADS = PayloadLimits(stall_s=60.0, send_s=60.0)
SHORT = PayloadLimits(stall_s=0.3, send_s=5.0)


@pytest.fixture
def ends():
    """A connection over loopback: the source's end and the target's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = socket.create_connection(listener.getsockname())
        target, _ = listener.accept()
    with source, target:
        yield source, target


@contextlib.contextmanager
def served(ends):
    source, target = ends
    thread = threading.Thread(target=serve_payloads, args=(target, PACE_PAYLOADS))
    thread.start()
    yield source
    source.close()
    thread.join(timeout=200)
    assert not thread.is_alive(), "the target sees that the source is done"


@pytest.mark.parametrize("size", [1, 400, PART_BYTES, PART_BYTES + 1, LARGE_BYTES])
def test_a_payload_arrives_whole(ends, size):
    with served(ends) as source:
        found = send_payload(source, size, PACE_PAYLOADS)
    assert (found.contact, found.size_bytes, found.error) == (Contact.CONNECTED, size, "")
    assert (found.duration_s > 0, found.sent > 0, found.delivered_bytes) == (True, True, None)


def test_a_payload_ends_when_its_time_is_up_and_segments_of_a_large_one_are_counted(ends):
    with served(ends) as source:
        found = send_payload(source, LARGE_BYTES, PayloadLimits(stall_s=60.0, send_s=0.0))
        large = send_large(source, PACE_PAYLOADS, 0.0)
    assert (found.contact, found.size_bytes) == (Contact.CONNECTED, PART_BYTES)
    assert large.contact is Contact.CONNECTED
    assert large.sent >= LARGE_BYTES // 65536


def test_a_target_that_takes_or_answers_nothing(ends):
    """Its kernel takes what its buffer holds, and then no more."""
    source, _ = ends
    found = send_payload(source, 400, SHORT)
    assert (found.contact, found.delivered_bytes) == (Contact.NO_ANSWER, 2 * NUMBER.size + 400)
    found = send_payload(source, 64 * 2**20, SHORT)
    assert (found.contact, found.error) == (Contact.NO_ANSWER, "no progress for 0.3 s")
    assert found.duration_s >= SHORT.stall_s, "how long it got on, to tell how fast it was"
    assert found.delivered_bytes > 0


@pytest.mark.parametrize("answer", [NUMBER.pack(400) + NUMBER.pack(1), b"garbage!"], ids=["other sum", "garbage"])
def test_a_payload_that_arrives_damaged(ends, answer):
    source, target = ends
    target.sendall(answer)
    found = send_payload(source, 400, PACE_PAYLOADS)
    assert (found.contact, found.error) == (Contact.FAILED, "the data that arrived is not the data that was sent")


def test_a_target_that_is_busy_hangs_up_takes_too_large_a_part_or_hears_nothing(ends):
    source, target = ends
    with pytest.raises(TargetBusy, match="busy with other nodes"):
        greet(source, b"hello", 5.0, 0.1)
    target.recv(100)
    with pytest.raises(TimeoutError):
        serve_payloads(target, PayloadLimits(stall_s=0.05, send_s=1.0))
    source.sendall(NUMBER.pack(PART_BYTES + 1))
    with pytest.raises(Damaged, match="over the limit"):
        serve_payloads(target, PACE_PAYLOADS)
    target.shutdown(socket.SHUT_WR)
    assert send_payload(source, 400, PACE_PAYLOADS).contact is Contact.RESET


def test_the_kernels_counts(ends):
    source, target = ends
    source.sendall(b"x" * 100)
    assert target.recv(100, socket.MSG_WAITALL) == b"x" * 100
    counts = read_tcp_counts(source)
    assert (counts["retransmitted"], counts["needless"], counts["sent"]) == (0, 0, 1)
    assert counts["delivered_bytes"] in {100, 101}


def test_a_socket_of_which_the_kernel_counts_nothing_and_a_rate_of_what_got_through():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        counts = read_tcp_counts(other)
    assert [*counts.values()] == [None] * 5
    assert rate_of(Transfer(size_bytes=1000, contact=Contact.CONNECTED, duration_s=0.5)) == 2000
    assert rate_of(Transfer(size_bytes=1000, contact=Contact.NO_ANSWER)) == 0


@pytest.mark.parametrize("count", [0, 1, 2, 3, 16, BLOCK, BLOCK + 1, BLOCK + 2, 200])
def test_all_ordered_pairs_once_and_each_node_serves_one_a_round(count):
    blocks = blocks_of(count)
    assert [len(block) for block in blocks] == [BLOCK] * (len(blocks) - 1) + [len(block) for block in blocks[-1:]]
    rounds = [one for block in blocks for one in block]
    assert len(rounds) == max(0, count - 1)
    pairs = set()
    for distance in rounds:
        one = range(distance, distance + 1)
        of_round = [(place, target) for place in range(count) for target in partners_of(place, one, count)[0]]
        assert len({target for _, target in of_round}) == len(of_round) == count
        assert all(list(partners_of(target, one, count)[1]) == [source] for source, target in of_round)
        pairs |= set(of_round)
    assert pairs == {(source, target) for source in range(count) for target in range(count) if source != target}


# The process that makes a real start: how its end is reported.


def fork(end):
    """Return the handle of a process that reads its orders, hangs up, and then ends as ``end`` does."""
    (read, tell), (hear, write) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        os.close(write)
        return StartProcess(pid, tell, hear)
    os.close(tell)
    os.close(hear)
    os.read(read, 4096)
    end(write)
    os._exit(3)


def hang_up_late(write):
    os.close(write)
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("end", "limit_s", "error"),
    [
        (hang_up_late, 5, "the process ended with status 3"),
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), 5, "the process was killed by SIGKILL"),
        (lambda _: time.sleep(60), -0.9, "it did not end within -0.9 s"),
    ],
)
def test_the_end_of_a_process_that_reports_nothing(end, limit_s, error):
    assert fork(end).run(limit_s=limit_s)["error"] == error


# What is seen of the place where the store is to be.


@contextlib.contextmanager
def listening(answer=None):
    """Listen on a port; ``answer`` is sent to whoever connects. Yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        if answer is not None:
                            connection.sendall(answer)
                            connection.recv(1024)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def torch():
    with TorchProcess(os.environ) as process:
        yield process


def test_no_store_listens_or_a_name_does_not_resolve():
    (refused,), (unresolved,) = knock("127.0.0.1", closed_port(), None), knock("no-such-host.invalid", 29500, None)
    assert (refused.contact, refused.address) == (Contact.REFUSED, "127.0.0.1")
    assert (unresolved.contact, unresolved.address) == (Contact.UNRESOLVED, None)


def test_a_program_that_is_no_store_a_store_a_port_that_is_taken_and_a_real_start(torch):
    with listening(b"HTTP/1.0 400 Bad request\r\n\r\n") as port:
        (other,) = knock("127.0.0.1", port, torch)
        assert (other.contact, bool(other.error)) == (Contact.NO_STORE, True)
    with listening() as port, pytest.raises(TorchError, match="EADDRINUSE"):
        torch.serve(port)
    port = closed_port()
    torch.serve(port)
    (seen,) = knock("127.0.0.1", port, torch)
    assert seen.contact is Contact.CONNECTED
    found = torch.start(60.0, rank=0, world_size=1, host="127.0.0.1", port=port, prefix="start")
    assert (found["stage"], found["error"]) == ("result", "")


@pytest.mark.full
def test_a_start_in_which_another_rank_never_comes():
    with TorchProcess(os.environ) as torch:
        port = closed_port()
        torch.serve(port)
        found = torch.start(1.0, rank=0, world_size=2, host="127.0.0.1", port=port, prefix="start")
    assert found["stage"] == "init_process_group"
    assert found["error"]


def test_a_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    paths = os.pathsep.join([str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    with TorchProcess({**os.environ, "PYTHONPATH": paths}) as torch, listening() as port:
        with pytest.raises(NoTorch, match=r"libcudart\.so\.13"):
            torch.serve(port)
        # What answers cannot be determined to be a store, nor to be none.
        (seen,) = knock("127.0.0.1", port, torch)
    assert seen.contact is Contact.CONNECTED


def test_whether_an_address_is_this_hosts_own():
    """192.0.2.1 is of TEST-NET-1 (RFC 5737)."""
    own = dict.fromkeys(("127.0.0.1", "localhost", "::1", "0.0.0.0", "192.0.2.1"), False)
    assert {host: is_own(host, 29500) for host in own} == own
    assert is_own("no-such-host.invalid", 29500) is None


def seen(contact):
    return (Connecting(host="n0", address="10.0.0.1", port=1, contact=contact),)
