"""What the kernel says a connection has received, of both families."""

import socket

import pytest

from ddpdoctor.collect.connections import read_received


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_bytes_of_a_connection_are_counted(family: socket.AddressFamily, host: str) -> None:
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        sender, _ = server.accept()
        with sender:
            sender.sendall(bytes(12_345))
            left = 12_345
            while left:
                left -= len(client.recv(left))
            port, served = client.getsockname()[1], server.getsockname()[1]
            (found,) = [one for one in read_received() if one.local_port == port]
    assert (found.size_bytes, found.remote.rpartition(":")[2]) == (12_345, str(served))
