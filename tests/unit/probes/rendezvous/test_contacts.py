import errno
import socket

import pytest

from ddpdoctor.exchange.reach import contact_of
from ddpdoctor.model.reaching import Contact
from ddpdoctor.probes.rendezvous.connections import connect_all


@pytest.mark.parametrize(
    ("error", "contact"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), Contact.REFUSED),
        (ConnectionResetError(errno.ECONNRESET, ""), Contact.RESET),
        (BrokenPipeError(errno.EPIPE, ""), Contact.RESET),
        (OSError(errno.EHOSTUNREACH, ""), Contact.UNREACHABLE),
        (OSError(errno.ENETUNREACH, ""), Contact.UNREACHABLE),
        (PermissionError(errno.EPERM, ""), Contact.UNREACHABLE),
        (TimeoutError(), Contact.NO_ANSWER),
        (TimeoutError(errno.ETIMEDOUT, ""), Contact.NO_ANSWER),
        (OSError(errno.EMFILE, ""), Contact.FAILED),
        (OSError("without a number"), Contact.FAILED),
    ],
)
def test_contact(error, contact):
    assert contact_of(error) is contact


def test_many_at_a_time_each_with_its_own_end():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        ports = [listener.getsockname()[1], held.getsockname()[1]]
        attempts = connect_all([("127.0.0.1", ports[0]), ("127.0.0.1", ports[1]), ("no number", 1)], 2.0)
        assert [attempt.seen.contact for attempt in attempts] == [Contact.CONNECTED, Contact.REFUSED, Contact.FAILED]
        assert [attempt.connection is None for attempt in attempts] == [False, True, True]
        attempts[0].connection.close()


def test_no_answer_in_time():
    """A listener whose queue is full: the kernel drops further first packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = listener.getsockname()
        with socket.create_connection(place):
            (attempt,) = connect_all([place], 0.2)
    assert (attempt.seen.contact, attempt.seen.tries) == (Contact.NO_ANSWER, 1)
    assert attempt.seen.error == "no answer to 1 first packets"
    assert attempt.pending == []
