"""The launcher's store is used as a client, beside what else is in it, and never waited for without end."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ddpdoctor.exchange.clocks import measure_clocks
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.node_meeting import HostedMeeting, OverStore, OwnPort, find_meeting
from ddpdoctor.exchange.store import StoreError, wait_for
from ddpdoctor.exchange.torch_store import TorchStore, open_torch_store
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher
from tests.scenarios.running import free_port


def launch(port, *, rank=1, agent_store=True):
    return Launch(
        launcher=Launcher.TORCHRUN, rank=rank, world_size=2, hosts=("127.0.0.1",), port=port, run="none/0",
        agent_store=agent_store,
    )  # fmt: skip


def wait_until_stopped(pid):
    """A signal is sent before it is heeded: the store's own thread may still answer on another core."""
    threads = Path(f"/proc/{pid}/task")
    deadline = time.monotonic() + 100
    while {stat.read_text().rpartition(")")[2].split()[0] for stat in threads.glob("*/stat")} != {"T"}:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_values_and_counters(agent):
    _, port = agent
    one, other = open_torch_store(launch(port), 60), open_torch_store(launch(port, rank=0), 60)
    one.set("a", b"\0\xff" * 1000)

    assert wait_for(lambda: other.look("a"), 60) == b"\0\xff" * 1000
    assert other.look("b") is None
    assert other.look("the launcher's") is None
    assert [one.add("n", 1), other.add("n", 2), one.add("n", 0)] == [1, 3, 3]
    one.close()
    one.close()


def test_rank_0_serves_where_no_agent_does():
    port = free_port()
    server = open_torch_store(launch(port, rank=0, agent_store=False), 60)
    peer = open_torch_store(launch(port, agent_store=False), 60)
    server.set("a", b"x")

    # torch's client does not wait for the server to have taken it.
    assert wait_for(lambda: peer.look("a"), 60) == b"x"


def test_an_agent_that_has_gone_is_told(agent):
    process, port = agent
    store = open_torch_store(launch(port), 60)
    process.kill()
    process.wait()
    with pytest.raises(StoreError, match="the launcher's store failed: "):
        store.look("a")


def test_an_agent_that_does_not_answer_is_not_waited_for_without_end(agent):
    process, port = agent
    opened = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store = TorchStore(opened, "ours/", call_limit_s=0.2)
    os.kill(process.pid, signal.SIGSTOP)
    wait_until_stopped(process.pid)
    with pytest.raises(StoreError, match="did not answer within"):
        store.look("a")
    os.kill(process.pid, signal.SIGCONT)


def test_where_nobody_listens_the_error_says_what_was_seen():
    port = free_port()
    with pytest.raises(StoreError, match=rf"tried for \d+ s; 127.0.0.1:{port}: connection refused"):
        open_torch_store(launch(port), 2)


def test_a_server_of_another_kind_is_told():
    words = "answers, and not as torchrun's store does"
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(StoreError, match=words):
        open_torch_store(launch(server.getsockname()[1]), 1)


def test_a_room_by_way_of_the_launcher_s_store(agent):
    """Where only the job's own port gets through, everything that a room is for goes over it."""
    _, port = agent
    with HostedMeeting(0, b"token", one_host=True) as hosted:
        hosted.serve_over(open_torch_store(launch(port, rank=0), 60))
        blocked = OwnPort(("127.0.0.1",), free_port())
        over = OverStore(lambda limit_s: open_torch_store(launch(port), limit_s))
        found = find_meeting([blocked, over], b"token", 60)
        Conversation(found.store).send_bytes("pack", bytes(1_000_000))
        found.store.beat("1", b"step 7")
        clocks = measure_clocks(found.store)

        assert found.way == "store"
        assert Conversation(hosted.store()).take_bytes("pack", 60) == bytes(1_000_000)
        assert hosted.heard()["1"].said == b"step 7"
        assert abs(clocks.monotonic_ns) <= clocks.error_ns
        found.store.close()
