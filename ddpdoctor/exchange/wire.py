"""The protocol between a server and its clients, how each side proves that it holds the job's token, and the clients.

First the server sends ``HELLO`` and 32 random bytes. The client sends 32 random bytes and HMAC("client", both). The
server sends HMAC("server", both). Then requests and answers alternate. A request is the length of the rest (4 bytes,
big-endian), operation (1 byte), length of the key (2 bytes), key, value. An answer is the length of the rest (4 bytes),
status (1 byte), value.

``DDPDOCTOR_TOKEN`` is the only real secret. Without it, another user of a Slurm cluster can derive the token, which
keeps out only other jobs and accidents; under torchrun and with --nnodes by hand anyone who reaches the port may take
part, as in the job's own store at MASTER_PORT. Such a stranger can send wrong facts, which are parsed within limits and
never run, and can read what others sent: hosts, stacks, variables of the allow-list. Nothing is ever encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import threading
from abc import ABC, abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING

from ddpdoctor.exchange import store
from ddpdoctor.exchange.reach import WrongServer, describe, reach, receive
from ddpdoctor.model.node import Launcher

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from ddpdoctor.exchange.reach import Failures
    from ddpdoctor.model.launch import Launch

HELLO = b"ddpdoctor server 1\n"
NONCE_BYTES = PROOF_BYTES = 32
MAX_REQUEST_BYTES = 3 + store.MAX_KEY_BYTES + store.MAX_VALUE_BYTES
LENGTH = struct.Struct("!I")
_TIMES = struct.Struct("!qq")
_REQUEST = struct.Struct("!BH")
CALL_LIMIT_S = 10.0  # our choice: a server answers in microseconds, but its host may be busy
VARIABLE = "DDPDOCTOR_TOKEN"
NO_TOKEN = b"ddpdoctor"  # The shared value if the job has no secret. It proves only that the other side is ddpdoctor.


class RequestType(IntEnum):
    """The first byte of a request."""

    SET, LOOK, ADD, NOW, FORGET, BEAT, LEAVE = range(1, 8)


class Status(IntEnum):
    """The first byte of an answer. ``NOTHING``: the key has no value yet. ``REFUSED``: the rest is the reason."""

    DONE, NOTHING, REFUSED = range(3)


class BadRequest(Exception):  # noqa: N818 - says what it is
    """A request that ddpdoctor's client would never send. The text is a phrase."""


def job_token(launch: Launch, env: Mapping[str, str]) -> bytes | None:
    if given := env.get(VARIABLE, ""):
        return token_bytes(given)
    if launch.launcher is Launcher.SLURM:
        return hashlib.sha256(f"ddpdoctor {launch.run} user {os.getuid()}".encode()).digest()
    return None


def token_bytes(given: str) -> bytes:
    return hashlib.sha256(given.encode(errors="surrogateescape")).digest()


def prove(token: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the proof that one side holds the token. It is valid for this connection only."""
    return hmac.new(token, side + b"\0" + server_nonce + client_nonce, hashlib.sha256).digest()


def with_length(rest: bytes) -> bytes:
    return LENGTH.pack(len(rest)) + rest


def pack_request(operation: RequestType, key: str, value: bytes) -> bytes:
    name = key.encode()
    return _REQUEST.pack(operation, len(name)) + name + value


def answer(values: store.KeyValues, request: bytes, member: str | None = None) -> tuple[bytes, str | None]:
    """Carry out a request; return the answer and the member that beats or leaves. Both are without their lengths.

    ``member`` is the one that has beaten over this connection so far. Raises ``BadRequest``, and carries out nothing,
    if our client would not send it.
    """
    try:
        number, length = _REQUEST.unpack_from(request)
        operation, key, value = RequestType(number), request[3 : 3 + length].decode(), request[3 + length :]
    except (struct.error, ValueError):
        raise BadRequest("a malformed request") from None
    if not 0 < length <= store.MAX_KEY_BYTES or len(request) < 3 + length:
        raise BadRequest("a malformed request")
    if operation in {RequestType.BEAT, RequestType.LEAVE}:
        if member not in {None, key}:  # else one connection could take the places of all members
            raise BadRequest("a beat of another member")
        member = key
    try:
        found = _carry_out(values, operation, key, value)
    except store.StoreError as error:
        return bytes([Status.REFUSED]) + str(error).encode(), member
    return (bytes([Status.NOTHING]) if found is None else bytes([Status.DONE]) + found), member


def _carry_out(values: store.KeyValues, operation: RequestType, key: str, value: bytes) -> bytes | None:
    if operation in {RequestType.SET, RequestType.ADD, RequestType.FORGET} and key.startswith(values.own_keys):
        raise store.StoreError("only the server itself writes this key")
    match operation:
        case RequestType.LOOK:
            return values.get(key)
        case RequestType.ADD:
            if not store.is_whole(value):
                raise store.StoreError("only whole numbers can be added")
            return b"%d" % values.add(key, int(value))
        case RequestType.NOW:
            return _TIMES.pack(*values.now())
        case RequestType.BEAT:
            return values.beat(key, value)
        case RequestType.LEAVE:
            values.leave(key, value)
        case RequestType.SET:
            values.set(key, value)
        case RequestType.FORGET:
            values.forget(key)
    return b""


class RemoteClient(ABC):
    """Asks a server elsewhere; how a request gets there is up to ``ask``. Implements ``store.Client``."""

    beat_every_s = store.BEAT_EVERY_S

    def __init__(self, served_by: str) -> None:
        """``served_by`` names the server in error messages: "rank 0", "the first node"."""
        self._served_by = served_by

    def set(self, key: str, value: bytes) -> None:
        self._call(RequestType.SET, key, value)

    def get(self, key: str) -> bytes | None:
        return self._call(RequestType.LOOK, key)

    def add(self, key: str, amount: int) -> int:
        found = self._call(RequestType.ADD, key, b"%d" % amount) or b"0"
        if not store.is_whole(found):
            raise self._misled(key)
        return int(found)

    def forget(self, key: str) -> None:
        self._call(RequestType.FORGET, key)

    def now(self) -> store.ClockTimes:
        found = self._call(RequestType.NOW, "now")
        if found is None or len(found) != _TIMES.size:
            raise self._misled("now")
        return store.ClockTimes(*_TIMES.unpack(found))

    def beat(self, member: str, said: bytes = b"") -> bytes:
        return self._call(RequestType.BEAT, member, said) or b""

    def leave(self, member: str, word: bytes = b"") -> None:
        self._call(RequestType.LEAVE, member, word)

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""

    @abstractmethod
    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request, both without their lengths; raises ``StoreError``."""

    def _call(self, operation: RequestType, key: str, value: bytes = b"") -> bytes | None:
        if len(value) > store.MAX_VALUE_BYTES or len(key.encode()) > store.MAX_KEY_BYTES:
            raise store.StoreError(f"{key[: store.MAX_KEY_BYTES]} is over the limit for a message")
        found = self.ask(pack_request(operation, key, value))
        if not found:
            raise self._misled(key)
        if found[0] == Status.REFUSED:
            raise store.StoreError(f"{self._served_by} refused {key}: {found[1:201].decode(errors='replace')}")
        return None if found[0] == Status.NOTHING else found[1:]

    def _misled(self, key: str) -> store.StoreError:
        return store.StoreError(f"{self._served_by} sent an invalid answer to {key}")


class ServerClient(RemoteClient):
    """A client over a connection on which both sides have proven the token."""

    def __init__(self, connection: socket.socket, served_by: str = "rank 0") -> None:
        super().__init__(served_by)
        connection.settimeout(CALL_LIMIT_S)
        self._connection = connection
        self._lock = threading.Lock()

    def close(self) -> None:
        self._connection.close()

    def ask(self, request: bytes) -> bytes:
        try:
            with self._lock:
                self._connection.sendall(with_length(request))
                (length,) = LENGTH.unpack(receive(self._connection, LENGTH.size))
                if not 0 < length <= 1 + store.MAX_VALUE_BYTES:
                    raise ConnectionError("an answer over the limit")
                return receive(self._connection, length)
        except OSError as error:
            # A late answer must not be mistaken for the answer to the next request.
            self._connection.close()
            raise store.StoreError(f"the connection to {self._served_by} failed: {describe(error)}") from error


def open_client(
    hosts: Sequence[str], port: int, token: bytes, limit_s: float, *, served_by: str = "rank 0",
    seen: Failures | None = None,
) -> ServerClient:  # fmt: skip
    """Connect to a server that may still be starting; raises ``StoreError`` as ``reach`` does."""

    def greet(connection: socket.socket) -> ServerClient:
        if receive(connection, len(HELLO)) != HELLO:
            raise WrongServer("another program answers, not ddpdoctor")
        theirs, ours = receive(connection, NONCE_BYTES), os.urandom(NONCE_BYTES)
        connection.sendall(ours + prove(token, b"client", theirs, ours))
        try:
            proof = receive(connection, PROOF_BYTES)
        except ConnectionError:
            proof = b""
        if not hmac.compare_digest(proof, prove(token, b"server", theirs, ours)):
            raise WrongServer("ddpdoctor answers, but has another token (DDPDOCTOR_TOKEN)")
        return ServerClient(connection, served_by)

    return reach(hosts, port, limit_s, greet, seen)
