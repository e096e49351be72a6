"""What is seen of the place where the store is to be."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from ddpdoctor.model.reaching import Connecting, Contact
from ddpdoctor.probes.rendezvous.store_probe import is_own, knock, more_telling
from ddpdoctor.probes.rendezvous.torch_process import NoTorch, TorchError, TorchProcess


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


def test_a_port_on_which_nobody_listens():
    (seen,) = knock("127.0.0.1", closed_port(), None)
    assert (seen.contact, seen.address) == (Contact.REFUSED, "127.0.0.1")


def test_a_name_that_does_not_resolve():
    (seen,) = knock("no-such-host.invalid", 29500, None)
    assert (seen.contact, seen.address) == (Contact.UNRESOLVED, None)


def test_a_program_that_is_no_store(torch):
    with listening(b"HTTP/1.0 400 Bad request\r\n\r\n") as port:
        (seen,) = knock("127.0.0.1", port, torch)
    assert seen.contact is Contact.NO_STORE
    assert seen.error


def test_a_store(torch):
    port = closed_port()
    torch.serve(port)
    (seen,) = knock("127.0.0.1", port, torch)
    assert seen.contact is Contact.CONNECTED


def test_a_port_that_is_taken(torch):
    with listening() as port, pytest.raises(TorchError, match="EADDRINUSE"):
        torch.serve(port)


def test_a_real_start_of_one_rank_and_then_no_other(torch):
    port = closed_port()
    torch.serve(port)
    found = torch.start(60.0, rank=0, world_size=1, host="127.0.0.1", port=port, prefix="start")
    assert (found["stage"], found["error"]) == ("result", "")


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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0"])
def test_loopback_is_no_address_of_its_own(host):
    assert not is_own(host, 29500)


def test_an_address_of_nobody_here():
    # Of TEST-NET-1 (RFC 5737).
    assert is_own("192.0.2.1", 29500) is False
    assert is_own("no-such-host.invalid", 29500) is None


def seen(contact):
    return (Connecting(host="n0", address="10.0.0.1", port=1, contact=contact),)


@pytest.mark.parametrize(
    ("earlier", "later", "reported"),
    [
        (Contact.CONNECTED, Contact.REFUSED, Contact.CONNECTED),
        (Contact.REFUSED, Contact.CONNECTED, Contact.CONNECTED),
        (Contact.NO_ANSWER, Contact.REFUSED, Contact.NO_ANSWER),
        (Contact.UNRESOLVED, Contact.REFUSED, Contact.REFUSED),
    ],
)
def test_of_two_looks_the_one_that_says_more_counts(earlier, later, reported):
    assert more_telling(seen(earlier), seen(later)) == seen(reported)


def test_no_look_says_nothing():
    assert more_telling((), seen(Contact.REFUSED)) == seen(Contact.REFUSED)
