"""A client of torch's TCPStore that does not import torch: importing takes a second and 135 MiB.

torch's own client also waits forever for another kind of server that stays silent. The protocol is that of
torch/csrc/distributed/c10d/TCPStore.cpp and TCPStoreBackend.hpp, identical in torch 2.6, 2.13 and 2.15. Numbers are in
host byte order; text and values follow their length (8 bytes). A client begins with VALIDATE and a magic number. The
server answers a PING with its nonce.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from enum import IntEnum

from ddpdoctor.exchange.reach import WrongServer, describe, reach, receive
from ddpdoctor.exchange.store import StoreError

CALL_LIMIT_S = 10.0  # our choice: the store answers in microseconds, but a busy host may take longer
ROOT = "/"  # the prefix that torch's own client puts before every key (``keyPrefix_``)
MAGIC = 0x3C85F7CE
MAX_KEYS = 2**17  # our choice: torch makes some keys for each rank and group
# Our choice for all keys together, whose number and lengths the other side says.
MAX_LIST_BYTES, LIST_LIMIT_S = 64 * 2**20, 30.0
MAX_VALUE_BYTES = 2**20  # the largest value that is read; none of ddpdoctor's values comes close
_LENGTH = struct.Struct("=Q")
_AMOUNT = struct.Struct("=q")
_MARK = struct.Struct("=I")
_READY = b"\0"


class _Query(IntEnum):
    """The request types of torch's ``QueryType``."""

    VALIDATE = 0
    SET = 1
    GET = 3
    ADD = 4
    CHECK = 5
    DELETE_KEY = 8
    PING = 13
    LIST_KEYS = 17


class StoreReader:
    """Reads the TCPStore that torchrun or rank 0 serves for the ranks. It has no way to write into it."""

    def __init__(self, connection: socket.socket, prefix: str = "") -> None:
        """Take ownership of the connection; ``prefix`` is put before each key."""
        connection.settimeout(CALL_LIMIT_S)
        # A SET has no answer. Without TCP_NODELAY the next request would wait 40 ms for the delayed acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._prefix = connection, prefix
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        # A GET of a missing key ends the connection. The key cannot vanish in between: only its reader removes it.
        return self._ask(_request(_Query.GET, self._text(key)), None) if self.has(key) else None

    def has(self, key: str) -> bool:
        return self._ask(_request(_Query.CHECK, _LENGTH.pack(1), self._text(key)), 1) == _READY

    def list_keys(self) -> tuple[str, ...]:
        """Return all keys, without the prefixes that all have.

        The server of an older torch does not know this request and closes the connection: ``StoreError``.
        """
        (count,) = _LENGTH.unpack(self._ask(_request(_Query.LIST_KEYS), _LENGTH.size))
        if count > MAX_KEYS:
            raise StoreError(f"the job's store has {count} keys")
        keys: list[str] = []
        size_bytes, deadline = 0, time.monotonic() + LIST_LIMIT_S
        for _ in range(count):
            key = self._ask(b"", None)
            size_bytes += len(key)
            if size_bytes > MAX_LIST_BYTES or time.monotonic() > deadline:
                raise StoreError("the keys of the job's store do not end")
            keys.append(key.decode(errors="replace").removeprefix(ROOT + self._prefix))
        return tuple(keys)

    def close(self) -> None:
        self._connection.close()

    def _text(self, key: str) -> bytes:
        return _with_length((ROOT + self._prefix + key).encode())

    def _ask(self, request: bytes, length: int | None) -> bytes:
        """Return an answer of ``length`` bytes; with None, the answer begins with its own length."""
        try:
            with self._lock:
                self._connection.sendall(request)
                if length is None:
                    (length,) = _LENGTH.unpack(receive(self._connection, _LENGTH.size))
                    if length > MAX_VALUE_BYTES:
                        raise ConnectionError("an answer over the limit")
                return receive(self._connection, length)
        except OSError as error:
            # A late answer must not be mistaken for the answer to the next request.
            self._connection.close()
            raise StoreError(f"the connection to the job's store failed: {describe(error)}") from error


class JobStore(StoreReader):
    """A ``Store`` over that connection; ``prefix`` separates ddpdoctor's keys from the launcher's and the job's."""

    def set(self, key: str, value: bytes) -> None:
        self._ask(_request(_Query.SET, self._text(key), _with_length(value)), 0)

    def add(self, key: str, amount: int) -> int:
        answer = self._ask(_request(_Query.ADD, self._text(key), _AMOUNT.pack(amount)), _AMOUNT.size)
        return int(_AMOUNT.unpack(answer)[0])

    def forget(self, key: str) -> None:
        self._ask(_request(_Query.DELETE_KEY, self._text(key)), _AMOUNT.size)


def open_store_reader(host: str, port: int, limit_s: float) -> StoreReader:
    """Connect to a store in order to read it; raises ``StoreError`` with the attempts and results."""
    return StoreReader(reach((host,), port, limit_s, _greet))


def open_job_store(host: str, port: int, prefix: str, limit_s: float) -> JobStore:
    """Connect to a store that may still be starting; raises ``StoreError`` with the attempts and results."""
    return JobStore(reach((host,), port, limit_s, _greet), prefix)


def _greet(connection: socket.socket) -> socket.socket:
    """Greet like torch's own client, and check that the other side answers as a TCPStore does."""
    nonce = os.urandom(_MARK.size)
    connection.sendall(_request(_Query.VALIDATE, _MARK.pack(MAGIC)) + _request(_Query.PING, nonce))
    if receive(connection, len(nonce)) != nonce:
        raise WrongServer("another program answers, not a store of torch")
    return connection


def _request(query: _Query, *parts: bytes) -> bytes:
    return bytes([query]) + b"".join(parts)


def _with_length(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data
