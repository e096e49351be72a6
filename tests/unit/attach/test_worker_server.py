"""Which address of a debug server is used: that on which the rank itself listens, and no other."""

import os
import socket

import pytest

from ddpdoctor.attach.process import read_host
from ddpdoctor.attach.worker_server import WorkerServer, find_server
from tests.unit.attach.records import seen_rank


@pytest.fixture
def own_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def found(address, pid=None, env=None):
    pid = os.getpid() if pid is None else pid
    return find_server(seen_rank(pid, 3), env or {}, {"debug_server/rank3": address}, read_host([pid]))


def test_the_address_in_the_store_on_which_the_rank_listens(own_port):
    assert found(f"http://node0:{own_port}") == WorkerServer(port=own_port)


def test_others_are_never_asked(own_port):
    assert found(f"http://node0:{own_port}", pid=os.getppid()) is None  # another process listens there
    assert found("http://node0:1") is None
    assert found("http://node0:70000") is None
    assert found("no address") is None


def test_a_path_that_another_rank_has_bound_is_not_this_ranks(tmp_path):
    path = str(tmp_path / "server.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        env = {"TORCH_WORKER_SERVER_SOCKET": path}
        assert found("", env=env) == WorkerServer(path=path)
        assert found("", pid=os.getppid(), env=env) is None
