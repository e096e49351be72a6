"""What tests of the exchange share: a store in this process, a clock, other servers, and a stranger's way to ours."""

import contextlib
import socket
import threading

from ddpdoctor.exchange.reach import receive
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.wire import HELLO, NONCE_BYTES, PROOF_BYTES, prove


class Shelf:
    """A ``Store`` that keeps everything it was ever asked to set."""

    def __init__(self):
        self.values = {}
        self.history = []
        self.ended = False
        self.closed = 0
        self._lock = threading.Lock()

    def set(self, key, value):
        with self._lock:
            self._check()
            self.values[key] = value
            self.history.append((key, value))

    def get(self, key):
        with self._lock:
            self._check()
            return self.values.get(key)

    def add(self, key, amount):
        with self._lock:
            self._check()
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = b"%d" % total
            return total

    def close(self):
        self.closed += 1

    def _check(self):
        if self.ended:
            raise StoreError("the store has ended")


class Clock:
    """A clock that the test sets."""

    now_s = 100.0

    def __call__(self):
        return self.now_s


@contextlib.contextmanager
def served(answer):
    """Serve connections with a function that gets each of them; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def prove_to(connection, token):
    """Read the greeting of a server and prove to hold the token; the server proves it as well."""
    nonce, own = receive(connection, len(HELLO) + NONCE_BYTES)[len(HELLO) :], bytes(NONCE_BYTES)
    connection.sendall(own + prove(token, b"client", nonce, own))
    assert receive(connection, PROOF_BYTES) == prove(token, b"server", nonce, own)


def is_hung_up(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
