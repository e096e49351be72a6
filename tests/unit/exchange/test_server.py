"""The server serves who holds the token, and nobody who is slow, wrong or too large keeps it from that."""

import contextlib
import gc
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ddpdoctor.exchange.job_store import StoreReader, open_job_store, open_store_reader
from ddpdoctor.exchange.meeting import meet
from ddpdoctor.exchange.reach import FIRST_PAUSE_S, reach, receive
from ddpdoctor.exchange.server import PROOF_LIMIT_S, REQUEST_LIMIT_S, SPARED_FILES, Server
from ddpdoctor.exchange.store import MAX_TOTAL_BYTES, MAX_VALUE_BYTES, KeyValues, StoreError
from ddpdoctor.exchange.wire import (
    HELLO,
    LENGTH,
    NONCE_BYTES,
    PROOF_BYTES,
    RequestType,
    ServerClient,
    Status,
    answer,
    open_client,
    pack_request,
    prove,
    with_length,
)
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher
from tests.golden import words
from tests.scenarios.running import free_port
from tests.scenarios.running import wait_for as wait_until
from tests.torch_stores import serve_torch_store
from tests.unit.exchange.shelf import Clock, is_hung_up, prove_to, served

TOKEN = b"token"


@pytest.fixture
def server():
    served = Server(0, TOKEN, one_host=True)
    yield served
    served.close()


def client(server, token=TOKEN, limit_s=60.0):
    return open_client(("127.0.0.1",), server.port, token, limit_s)


def connect(server):
    """Connect as a stranger would; return the connection after the greeting, with its challenge."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=200)
    return connection, receive(connection, len(HELLO) + NONCE_BYTES)[len(HELLO) :]


def proven(server):
    """Return a connection over which the token was proven."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=200)
    prove_to(connection, TOKEN)
    return connection


@pytest.fixture(scope="module", params=["libuv", "threads"])
def agent(request):
    """A process that serves a store by one of torch's servers, as torchrun's agent does; yields it with its port."""
    with serve_torch_store(request.param) as served:
        yield served


@contextlib.contextmanager
def files(most):
    """Let this process open so many files at most, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("amount", [b"1" * 21, b"x", b"", b"1.5"])
def test_what_is_no_amount_is_refused_whole(amount):
    values = KeyValues()
    values.add("n", 1)
    assert answer(values, pack_request(RequestType.ADD, "n", amount))[0][0] == Status.REFUSED
    assert values.add("n", 0) == 1


def test_all_addresses_of_a_name_are_tried_within_one_limit(monkeypatch):
    """A server that says nothing at the first address takes up the time of the others."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", server.getsockname())
        second = (*found[:4], ("127.0.0.2", server.getsockname()[1]))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found, second])
        limits = []

        def greet(connection):
            limits.append(connection.gettimeout())
            connection.recv(1)

        with pytest.raises(StoreError), socket.create_server(second[4]):
            reach(("name",), server.getsockname()[1], 0.5, greet)
    assert len(limits) == 2
    assert limits[1] <= FIRST_PAUSE_S < limits[0]


def test_a_proof_cannot_be_used_again(server):
    connection, nonce = connect(server)
    own = bytes(NONCE_BYTES)
    proof = own + prove(TOKEN, b"client", nonce, own)
    connection.sendall(proof)
    assert receive(connection, PROOF_BYTES)

    again, _ = connect(server)
    again.sendall(proof)
    assert is_hung_up(again)


def after_garbage(row):
    """Return whether who sends this is hung up on, and what the next one counts."""
    with contextlib.closing(Server(0, TOKEN, one_host=True)) as served:
        connection, garbage = eval(row, globals(), {"served": served, "LENGTH": LENGTH})
        connection.sendall(garbage)
        return is_hung_up(connection), client(served).add("n", 1)


test_words = words(__name__, after_garbage=after_garbage)


def test_who_proves_nothing_is_hung_up_on_in_time():
    clock = Clock()
    served = Server(0, TOKEN, one_host=True, clock=clock)
    silent, _ = connect(served)
    slow, _ = connect(served)
    proven = client(served)
    clock.now_s += PROOF_LIMIT_S - 1
    slow.send(b"x")  # a byte now and then does not help
    assert proven.add("n", 1) == 1
    clock.now_s += 1

    assert is_hung_up(silent)
    assert is_hung_up(slow)
    clock.now_s += 1000  # it may rest between two requests for as long as it likes
    assert proven.add("n", 1) == 2
    served.close()


def test_strangers_do_not_keep_out_who_holds_the_token():
    """Where all places are taken, the one that has not proven itself for longest loses its own."""
    served = Server(0, TOKEN, one_host=True, max_peers=3)
    first = client(served)
    strangers = [connect(served)[0] for _ in range(2)]
    second = client(served)
    assert is_hung_up(strangers[0])
    third = client(served)
    assert is_hung_up(strangers[1])
    assert [one.add("n", 1) for one in (first, second, third)] == [1, 2, 3]
    # All have proven themselves: who comes now is the one too many.
    with pytest.raises(StoreError):
        client(served, limit_s=0.2)
    assert first.add("n", 1) == 4
    served.close()


def test_a_request_that_drips_in_has_one_deadline_for_all_of_it_and_who_is_hung_up_on_counts_as_lost():
    """The member's task ends where the server has already dropped its connection."""
    clock = Clock()
    served = Server(0, TOKEN, one_host=True, clock=clock)
    connection = proven(served)
    connection.sendall(with_length(pack_request(RequestType.BEAT, "7", b"")))
    # Until that request has ended, its deadline is the one that the next would have.
    assert wait_until(lambda: any(peer.member == "7" and peer.deadline_s is None for peer in served.peers))
    began_s = clock.now_s
    for byte in with_length(bytes(1000))[:10]:
        connection.sendall(bytes([byte]))
        assert wait_until(lambda: any(peer.deadline_s == began_s + REQUEST_LIMIT_S for peer in served.peers))
        clock.now_s += REQUEST_LIMIT_S / 20
    clock.now_s = began_s + REQUEST_LIMIT_S
    assert wait_until(lambda: served.values.heard()["7"].broken_ns is not None)
    served.close()


def test_the_limit_of_all_values_holds():
    values, most = KeyValues(), bytes(MAX_VALUE_BYTES)
    for number in range(MAX_TOTAL_BYTES // MAX_VALUE_BYTES):
        values.set(str(number), most)
    with pytest.raises(StoreError, match="over the limit"):
        values.set("one more", most)
    values.set("0", most)  # what replaces a value of its size takes no more room


@pytest.mark.full
def test_thousands_of_clients_at_once_until_the_server_closes(server):
    """1,100 clients stay connected together where this process may open so many files; each also counts."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = 1100 if hard == resource.RLIM_INFINITY or hard > 3000 else 200
    with contextlib.ExitStack() as stack:
        stack.enter_context(files(hard))
        stores = [stack.enter_context(contextlib.closing(client(server, limit_s=60))) for _ in range(wanted)]
        assert [store.add("n", 1) for store in stores] == list(range(1, wanted + 1))
        server.close()
        with pytest.raises(StoreError, match="the connection to rank 0 failed"):
            stores[0].get("a")
        assert wait_until(lambda: not server._thread.is_alive())


def test_it_listens_on_all_addresses_of_both_families_where_there_are_several_hosts():
    served = Server(0, TOKEN)
    addresses = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
    assert [open_client((address,), served.port, TOKEN, 60).add("n", 1) for address in addresses] == [1, 2][
        : len(addresses)
    ]
    served.close()


def test_files_that_run_out_make_clients_wait_and_no_loop_spin(server):
    """Where accept fails for want of files the server rests, and serves those who wait once there are some again."""
    first = client(server)
    waiting = socket.socket()
    gc.collect()  # sockets that earlier tests left in cycles must not free their numbers meanwhile
    used = max(int(file.name) for file in Path("/proc/self/fd").iterdir()) + 1
    with contextlib.ExitStack() as held, files(used + 1):
        with contextlib.suppress(OSError):
            while True:
                held.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        waiting.settimeout(200)
        waiting.connect(("127.0.0.1", server.port))
        began = time.process_time()
        assert first.add("n", 1) == 1
        time.sleep(1)
        assert time.process_time() - began < 0.5
    assert receive(waiting, len(HELLO)) == HELLO


def test_connections_leave_files_for_what_else_this_process_does(server):
    first = client(server)
    gc.collect()  # as above
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(SPARED_FILES)]
    with files(max(held) + SPARED_FILES // 2), pytest.raises(StoreError):
        client(server, limit_s=0.2)
    assert first.add("n", 1) == 1
    for file in held:
        os.close(file)
    assert client(server).add("n", 1) == 2


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one():
    ours, theirs = socket.socketpair()
    store = ServerClient(ours)
    ours.settimeout(0.01)
    with pytest.raises(StoreError):
        store.get("a")
    with contextlib.suppress(OSError):
        theirs.sendall(with_length(bytes([Status.DONE]) + b"of a"))
    with pytest.raises(StoreError):
        store.get("b")
    theirs.close()


# The job's store is used without torch: by the same bytes, beside what else is in it, and never waited for in
# vain.


PREFIX = "ddpdoctor/test/"


@pytest.fixture
def torchs(agent):
    """A client of torch's own."""
    return TCPStore("127.0.0.1", agent[1], is_master=False, timeout=timedelta(seconds=100))


def opened(agent, limit_s=60):
    return open_job_store("127.0.0.1", agent[1], PREFIX, limit_s)


def put(torchs, key, value):
    """Set a value, and have an answer that comes after it."""
    torchs.set(PREFIX + key, value)
    assert torchs.check([PREFIX + key])


def test_a_reader_sees_all_keys_and_has_no_way_to_write(agent, torchs):
    put(torchs, "key", "value")
    reader = open_store_reader("127.0.0.1", agent[1], 60)
    keys = reader.list_keys()
    assert PREFIX + "key" in keys
    assert (reader.get(PREFIX + "key"), reader.get(PREFIX + "none")) == (b"value", None)
    assert reader.list_keys() == keys
    assert sorted(torchs.list_keys()) == sorted(keys)
    assert {name for name in vars(StoreReader) if not name.startswith("_")} == {"get", "has", "list_keys", "close"}


def test_torch_and_we_read_what_the_other_wrote(agent, torchs):
    ours = opened(agent)
    value = random.Random(1).randbytes(100_000)
    ours.set("key", value)
    assert ours.get("key") == value  # our own set is through, too
    assert torchs.get(PREFIX + "key") == value
    put(torchs, "theirs", "value")
    assert (ours.get("theirs"), ours.get("nothing"), ours.get("the launcher's")) == (b"value", None, None)
    put(torchs, "empty", "")
    assert ours.get("empty") == b""
    assert [ours.add("count", n) for n in (0, 3, -1)] == [0, 3, 2]
    assert torchs.add(PREFIX + "count", 1) == 3
    assert torchs.get("the launcher's") == b"own"


def test_threads_share_a_connection(agent):
    ours = opened(agent)

    def count(thread):
        for number in range(50):
            ours.add("turns", 1)
            ours.set(f"{thread}/{number}", b"x" * number)
            assert ours.get(f"{thread}/{number}") == b"x" * number

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(count, range(4))] == [None] * 4
    assert ours.add("turns", 0) == 200


def test_a_value_over_the_limit_is_not_read(agent, torchs):
    ours = opened(agent)
    put(torchs, "large", "x" * (2**20 + 1))
    with pytest.raises(StoreError, match="over the limit"):
        ours.get("large")


def test_a_store_that_ends_is_reported():
    with serve_torch_store() as agent:
        ours = opened(agent)
        assert ours.add("count", 1) == 1
        agent[0].kill()
        agent[0].wait()
        with pytest.raises(StoreError, match="the connection to the job's store failed"):
            ours.add("count", 1)
        with pytest.raises(StoreError, match="connection refused"):
            opened(agent, 2)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"abc", None])
def test_what_is_no_store_or_says_nothing_is_not_taken_for_one(answer):
    def say(connection):
        while connection.recv(64) and answer is None:
            pass
        connection.sendall(answer or b"")

    said = "no answer" if answer is None else "not a store of torch|closed the connection|reset"
    with served(say) as port, pytest.raises(StoreError, match=said):
        open_job_store("127.0.0.1", port, PREFIX, 2)


def test_a_store_that_does_not_answer_is_not_waited_for_without_end(agent):
    """A signal is sent before it is heeded: the store's own thread may still answer on another core."""
    process, _ = agent
    ours = opened(agent)
    ours._connection.settimeout(0.2)
    os.kill(process.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")
    assert wait_until(
        lambda: {stat.read_text().rpartition(")")[2].split()[0] for stat in threads.glob("*/stat")} == {"T"}
    )
    with pytest.raises(StoreError, match="the connection to the job's store failed: no answer"):
        ours.get("a")
    os.kill(process.pid, signal.SIGCONT)


RANK_1 = """
import sys
from ddpdoctor.exchange.meeting import meet
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher

port = int(sys.argv[1])
launch = Launch(launcher=Launcher.TORCHRUN, rank=1, world_size=2, hosts=("127.0.0.1",), port=port, run="a/0")
with meet(launch, {}, 100) as conversation:
    conversation.send("rank/1", launch)
    conversation.hear_goodbye(Launch, 100)
sys.exit("torch" in sys.modules)
"""


def test_rank_0_serves_the_store_where_no_agent_does(monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    port = free_port()
    launch = Launch(launcher=Launcher.TORCHRUN, rank=0, world_size=2, hosts=("127.0.0.1",), port=port, run="a/0")
    with subprocess.Popen([sys.executable, "-c", RANK_1, str(port)]) as other, meet(launch, {}, 100) as conversation:
        assert conversation.gather(Launch, "rank", lambda: (1,), 100)[1].rank == 1
        conversation.say_goodbye(launch, lambda: 1, 100)
        assert other.wait() == 0
