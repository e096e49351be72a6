"""What a failed connection says of what is in the way."""

from __future__ import annotations

import errno

from ddpdoctor.model.reaching import Contact

_BY_ERRNO = {
    errno.ECONNREFUSED: Contact.REFUSED,
    errno.ECONNABORTED: Contact.RESET,
    errno.EPIPE: Contact.RESET,
    errno.EHOSTUNREACH: Contact.UNREACHABLE,
    errno.ENETUNREACH: Contact.UNREACHABLE,
    errno.EACCES: Contact.UNREACHABLE,
    # What connect() returns where this host's own packet filter drops the packet on its way out.
    errno.EPERM: Contact.UNREACHABLE,
    errno.ETIMEDOUT: Contact.NO_ANSWER,
}


def contact_of(error: OSError) -> Contact:
    """Return how a connection failed, after its name was resolved."""
    if isinstance(error, TimeoutError):
        return Contact.NO_ANSWER
    if isinstance(error, ConnectionResetError):  # ours too, which have words and no number
        return Contact.RESET
    return _BY_ERRNO.get(error.errno or 0, Contact.FAILED)
