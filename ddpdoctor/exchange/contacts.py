"""What a failed connection says of what is in the way."""

from __future__ import annotations

import errno

from ddpdoctor.model.reaching import Contact

_BY_ERRNO = {
    errno.ECONNREFUSED: Contact.REFUSED,
    errno.ECONNRESET: Contact.RESET,
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
    # A connection that ends in the middle of an answer has words of ours and no number.
    return _BY_ERRNO.get(error.errno or 0, Contact.RESET if isinstance(error, ConnectionError) else Contact.FAILED)
