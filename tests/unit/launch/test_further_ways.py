"""Where the members' own port cannot be had, a word in the job's store leads to another, and outlives the store."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.meeting import OtherPort, OwnPort, open_meeting
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.launch.command.placement import Placement, Style
from ddpdoctor.launch.nodes.first_node import FirstNode
from ddpdoctor.launch.nodes.further_ways import PREFIX, SECOND_PORT, SecondPort, further_ways
from ddpdoctor.launch.nodes.other_node import OtherNode
from ddpdoctor.launch.nodes.own_host import MOST_ADDRESSES, own_addresses
from tests.scenarios.running import free_port, wait_for
from tests.torch_stores import serve_torch_store


@pytest.fixture
def store() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves the job's store, with its port."""
    with serve_torch_store() as served:
        yield served


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program has, which says nothing."""
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


def place(number: int, port: int, store: int, token: bytes = b"secret") -> Placement:
    return Placement(
        style=Style.TORCHRUN, number=number, expected=2, most=2, hosts=("127.0.0.1",), port=port, one_host=True,
        token=token, store=("127.0.0.1", store),
    )  # fmt: skip


def member(placement: Placement, folder: Path) -> OtherNode:
    other = OtherNode(
        placement, "node1", (OwnPort(placement.hosts, placement.port), *further_ways(placement, folder / "none"))
    )
    other.start()
    return other


def has_come(first: FirstNode, folder: Path) -> Callable[[], bool]:
    return lambda: first.save(folder).nodes[1].clock_offset_ns is not None


def test_nodes_meet_where_a_word_in_the_store_says_and_stay_when_it_ends(store, taken, tmp_path):
    process, port = store
    first = FirstNode(place(0, taken, port), "node0", tmp_path)
    assert "cannot listen on" in first.serve()
    assert "cannot listen to the other nodes" in str(first.failure)
    other = member(place(1, taken, port), tmp_path)
    assert wait_for(has_come(first, tmp_path))
    assert first.failure is None
    process.kill()
    process.wait()
    first.ask()
    assert wait_for(lambda: other.request != 0)
    other.answer(other.request, b"packed", moved=False)
    assert wait_for(first.has_answers)
    other.close()
    first.close()


def test_a_member_that_lost_its_connection_finds_the_first_without_the_store(store, taken, tmp_path):
    process, port = store
    first = FirstNode(place(0, taken, port), "node0", tmp_path)
    first.serve()
    way = next(way for way in further_ways(place(1, taken, port), tmp_path) if isinstance(way, OtherPort))

    def opens() -> bool:
        with contextlib.suppress(StoreError):
            open_meeting(way, b"secret", 3).close()
            return True
        return False

    assert wait_for(opens)
    process.kill()
    process.wait()
    assert opens()
    first.close()
    assert not opens()


def test_the_store_is_left_in_peace_while_nobody_is_missed(store, tmp_path):
    _, port = store
    number = free_port()
    first = FirstNode(place(0, number, port), "node0", tmp_path, further_after_s=1000.0)
    assert not first.serve()
    other = member(place(1, number, port), tmp_path)
    assert wait_for(has_come(first, tmp_path))
    looked = open_job_store("127.0.0.1", port, PREFIX, 60)
    assert not wait_for(lambda: looked.get(SECOND_PORT) is not None, 2.5)
    other.close()
    # One that is yet to come has word left for it.
    third = FirstNode(replace(place(0, number + 1, port), hosts=()), "node0", tmp_path, further_after_s=0.0)
    third.serve()
    assert wait_for(lambda: looked.get(SECOND_PORT) is not None)
    third.close()
    first.close()


@pytest.mark.parametrize(
    ("token", "words"), [(b"secret", "connection refused"), (b"another", "no message|not signed|token")]
)
def test_a_word_that_leads_nowhere_or_is_a_stranger_s(store, taken, tmp_path, token, words):
    _, port = store
    with contextlib.closing(open_job_store("127.0.0.1", port, PREFIX, 60)) as opened:
        Conversation(opened, token).send(SECOND_PORT, SecondPort(hosts=("127.0.0.1",), port=1))
        assert opened.get(SECOND_PORT) is not None
    way = next(way for way in further_ways(place(1, taken, port), tmp_path) if isinstance(way, OtherPort))
    with pytest.raises(StoreError, match=words):
        open_meeting(way, b"secret", 3.0)


def test_a_word_of_very_many_addresses_starts_no_thread_for_each(store, taken, tmp_path):
    _, port = store
    with contextlib.closing(open_job_store("127.0.0.1", port, PREFIX, 60)) as opened:
        Conversation(opened, b"secret").send(
            SECOND_PORT, SecondPort(hosts=tuple(f"127.0.0.{n}" for n in range(1, 200)), port=1)
        )
        assert opened.get(SECOND_PORT) is not None
    way = next(way for way in further_ways(place(1, taken, port), tmp_path) if isinstance(way, OtherPort))
    with pytest.raises(StoreError) as reported:
        open_meeting(way, b"secret", 3.0)
    assert str(reported.value).count("connection refused") == MOST_ADDRESSES


def test_the_addresses_of_the_interface_that_the_job_uses_come_first(monkeypatch):
    monkeypatch.setattr(
        "ddpdoctor.collect.system.SystemCalls.interface_addresses",
        lambda _calls: {
            "lo": ("127.0.0.1/8", "::1/128"), "docker0": ("172.17.0.1/16",),
            "eth0": ("10.0.0.4/24", "fe80::1/64"), "ib0": ("192.168.7.4/24", "2001:db8::4/64"),
        },
    )  # fmt: skip
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert own_addresses() == ("172.17.0.1", "10.0.0.4", "192.168.7.4", "2001:db8::4")
    monkeypatch.setattr(socket, "gethostname", lambda: "10.0.0.4")
    assert own_addresses()[0] == "10.0.0.4"
    monkeypatch.setitem(os.environ, "NCCL_SOCKET_IFNAME", "=ib")
    assert own_addresses()[:3] == ("192.168.7.4", "2001:db8::4", "10.0.0.4")
    monkeypatch.setitem(os.environ, "NCCL_SOCKET_IFNAME", "^docker,lo")
    assert own_addresses()[0] == "10.0.0.4"
