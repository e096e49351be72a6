"""Probes the store's address: looks up its name, connects to every address, and joins what answers as a store."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ddpdoctor.exchange.reach import CONNECT_LIMIT_S, LOOKUP_LIMIT_S, contact_of, describe, look_up
from ddpdoctor.model.reaching import Connecting, Contact
from ddpdoctor.probes.rendezvous.torch_process import NoTorch, TorchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

    from ddpdoctor.probes.rendezvous.torch_process import TorchProcess

FIRST_AFTER_S = 1.0
EVERY_S = 2.0
_TELLING = (
    Contact.CONNECTED, Contact.NO_STORE, Contact.RESET, Contact.UNREACHABLE, Contact.NO_ANSWER, Contact.FAILED,
    Contact.REFUSED, Contact.UNRESOLVED,
)  # fmt: skip
"""The most telling result first. A refused connection says little: nobody listens there yet, or any more."""


class StoreWatch:
    """A context manager that probes the store from a thread, every ``EVERY_S`` seconds."""

    def __init__(self, host: str, port: int, torch: TorchProcess) -> None:
        """``host`` and ``port`` are where the store should be."""
        self.attempts: tuple[Connecting, ...] = ()
        """The attempts of the most telling probe."""
        self._host, self._port, self._torch = host, port, torch
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._probe, name="ddpdoctor-store", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # without waiting for a probe that is under way

    def _probe(self) -> None:
        pause_s = FIRST_AFTER_S
        while not self._ended.wait(pause_s):
            pause_s = EVERY_S
            found = knock(self._host, self._port, self._torch if self._torch.is_ready else None)
            if not self._ended.is_set():
                self.attempts = more_telling(self.attempts, found)


def more_telling(one: tuple[Connecting, ...], other: tuple[Connecting, ...]) -> tuple[Connecting, ...]:
    """Return the more telling of two probes. If they are equal, return the later one, which is ``other``."""
    return min((other, one), key=_order)


def _order(attempts: tuple[Connecting, ...]) -> int:
    return min((_TELLING.index(one.contact) for one in attempts), default=len(_TELLING))


JOIN_LIMIT_S = 5.0
"""Our choice: a store answers within milliseconds once its port does."""


def knock(host: str, port: int, torch: TorchProcess | None) -> tuple[Connecting, ...]:
    """Connect to every address of a name, and join the first that answers as a torch store.

    There is one attempt per address, in torch's order: IPv6 first (``prefer_ipv6`` in c10d's socket.h). Without torch,
    anything that answers counts as a store.
    """
    began = time.monotonic()
    try:
        addresses = look_up(host, port, LOOKUP_LIMIT_S)
    except OSError as error:
        return (_seen(host, None, port, Contact.UNRESOLVED, describe(error), began),)
    addresses.sort(key=lambda one: one[0] is not socket.AF_INET6)
    attempts = [_connect(host, family, address) for family, address in addresses]
    if torch is not None and any(one.contact is Contact.CONNECTED for one in attempts):
        attempts = _join(attempts, torch)
    return tuple(attempts)


def is_own(host: str, port: int) -> bool | None:
    """Return whether a name resolves to a non-loopback address of this host, or None if it does not resolve."""
    try:
        addresses = look_up(host, port, LOOKUP_LIMIT_S)
    except OSError:
        return None
    for family, address in addresses:
        if address[0].startswith("127.") or address[0] in {"::1", "0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
            continue
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind((address[0], 0, *address[2:]))
            return True
    return False


def _connect(host: str, family: socket.AddressFamily, address: Any) -> Connecting:
    began = time.monotonic()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(CONNECT_LIMIT_S)
            connection.connect(address)
    except OSError as error:
        return _seen(host, address[0], address[1], contact_of(error), describe(error), began)
    return _seen(host, address[0], address[1], Contact.CONNECTED, "", began)


def _join(attempts: Iterable[Connecting], torch: TorchProcess) -> list[Connecting]:
    """Join the addresses that answered until one is a torch store. Mark the others as ``NO_STORE``."""
    judged: list[Connecting] = []
    joined = False
    for one in attempts:
        if one.contact is not Contact.CONNECTED or joined:
            judged.append(one)
            continue
        began = time.monotonic()
        try:
            torch.join(one.address or one.host, one.port, JOIN_LIMIT_S)
        except NoTorch:
            judged.append(one)
        except TorchError as error:
            judged.append(_seen(one.host, one.address, one.port, Contact.NO_STORE, str(error), began))
        else:
            joined = True
            judged.append(one)
    return judged


def _seen(host: str, address: str | None, port: int, contact: Contact, error: str, began: float) -> Connecting:
    return Connecting(
        host=host, address=address, port=port, contact=contact, error=error, duration_s=time.monotonic() - began
    )
