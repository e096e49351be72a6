"""What a node saw when it tried to connect to the others, as sentences, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.reaching import Contact
from ddpdoctor.rules.firewall_opening import EPHEMERAL
from ddpdoctor.rules.rendezvous.meeting import describe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.reaching import Connecting

CHECK = "run `ddpdoctor check-rendezvous` on every node: it tells which cannot reach which"


def attempts_at(reached: Iterable[Connecting], host: str) -> tuple[Connecting, ...]:
    """Return the attempts to connect to a host."""
    return tuple(attempt for attempt in reached if host and host in (attempt.host, attempt.address))


def reached_words(reached: Iterable[Connecting]) -> list[str]:
    """Return one sentence for each attempt to connect."""
    return [f"a connection from here to {describe(attempt)}" for attempt in reached]


def failing(reached: Iterable[Connecting]) -> Connecting | None:
    """Return the first attempt that did not get through."""
    return next((attempt for attempt in reached if attempt.contact is not Contact.CONNECTED), None)


def reach_fix(attempt: Connecting, here: str) -> str:
    """Return what to do about an address that ``here`` cannot reach."""
    place = f"{attempt.host}:{attempt.port}"
    if attempt.contact is Contact.UNRESOLVED:
        return f"getent hosts {attempt.host} on {here} shows what it knows; add the name to DNS or to /etc/hosts"
    if attempt.contact is Contact.REFUSED:
        return f"see whether the job was started on {attempt.host}: ss -ltnp 'sport = :{attempt.port}' there; {CHECK}"
    if attempt.contact is Contact.NO_STORE:
        return f"another program has {place}: take another port (--rdzv-endpoint, --master-port)"
    ports = f"{EPHEMERAL[0]}-{EPHEMERAL[1]}"
    return f"let {here} in to {place} and to ports {ports} (nft list ruleset on {attempt.host}); {CHECK}"
