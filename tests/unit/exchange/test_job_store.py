"""The job's store is used without torch: by the same bytes, beside what else is in it, and never waited for in vain."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ddpdoctor.exchange.clocks import measure_clocks
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.job_store import StoreReader, open_job_store, open_store_reader
from ddpdoctor.exchange.meeting import HostedMeeting, OverStore, OwnPort, find_meeting, meet
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher
from tests.scenarios.running import free_port
from tests.scenarios.running import wait_for as wait_until

PREFIX = "ddpdoctor/test/"


@pytest.fixture(params=["libuv", "threads"])
def backend(request):
    return request.param


@pytest.fixture
def torchs(agent):
    """A client of torch's own."""
    return TCPStore("127.0.0.1", agent[1], is_master=False, timeout=timedelta(seconds=100))


def opened(agent):
    return open_job_store("127.0.0.1", agent[1], PREFIX, 60)


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

    def count():
        for number in range(200):
            ours.add("count", 1)
            ours.set(f"{threading.get_ident()}/{number}", b"x" * number)
            assert ours.get(f"{threading.get_ident()}/{number}") == b"x" * number

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ours.add("count", 0) == 800


def test_a_client_that_leaves_in_the_middle_of_a_request_harms_nobody(agent, torchs):
    for cut in range(1, 30, 4):
        with socket.create_connection(("127.0.0.1", agent[1])) as connection:
            connection.sendall((b"\0" + b"\xce\xf7\x85\x3c" + b"\x01" + (8).to_bytes(8, "little") + b"k" * 8)[:cut])
    torchs.set("still", "there")
    assert torchs.get("still") == b"there"


def test_a_value_over_the_limit_is_not_read(agent, torchs):
    ours = opened(agent)
    put(torchs, "large", "x" * (2**20 + 1))
    with pytest.raises(StoreError, match="over the limit"):
        ours.get("large")


def test_a_store_that_ends_is_reported(agent):
    process, _ = agent
    ours = opened(agent)
    assert ours.add("count", 1) == 1
    process.kill()
    process.wait()
    with pytest.raises(StoreError, match="the connection to the job's store failed"):
        ours.add("count", 1)
    with pytest.raises(StoreError, match="connection refused"):
        open_job_store("127.0.0.1", agent[1], PREFIX, 2)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"abc"])
def test_what_is_no_store_is_not_taken_for_one(answer):
    def serve(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(64)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        with pytest.raises(StoreError, match=r"not a store of torch|closed the connection|reset"):
            open_job_store("127.0.0.1", listener.getsockname()[1], PREFIX, 2)


def test_what_takes_the_connection_and_says_nothing_costs_the_limit_only():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(StoreError, match="no answer"):
        open_job_store("127.0.0.1", listener.getsockname()[1], PREFIX, 2)


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


def test_nodes_meet_by_way_of_the_launchers_store(agent):
    """Where only the job's own port gets through, everything that nodes say goes over it."""
    with HostedMeeting(0, b"token", one_host=True) as hosted:
        hosted.serve_over(opened(agent))
        blocked = OwnPort(("127.0.0.1",), free_port())
        found = find_meeting([blocked, OverStore(lambda _: opened(agent))], b"token", 60)
        Conversation(found.store).send_bytes("pack", bytes(1_000_000))
        found.store.beat("1", b"step 7")
        clocks = measure_clocks(found.store)

        assert found.way == "store"
        assert Conversation(hosted.store()).take_bytes("pack", 60) == bytes(1_000_000)
        assert hosted.heard()["1"].said == b"step 7"
        assert abs(clocks.monotonic_ns) <= clocks.error_ns
        found.store.close()


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


def test_it_imports_no_torch():
    code = "import sys, ddpdoctor.exchange.job_store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
