import os
import socket
import threading

import pytest

from ddpdoctor.model.reaching import Contact, Transfer
from ddpdoctor.probes.rendezvous.payloads import (
    LARGE_BYTES,
    NUMBER,
    PART_BYTES,
    Damaged,
    PayloadLimits,
    TargetBusy,
    greet,
    rate_of,
    send_large,
    send_payload,
    serve_payloads,
)
from ddpdoctor.probes.rendezvous.tcp_info import read_tcp_counts

PACE = PayloadLimits(stall_s=60.0, send_s=60.0)
SHORT = PayloadLimits(stall_s=0.3, send_s=5.0)


@pytest.fixture
def ends():
    """A connection over loopback: the source's end and the target's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = socket.create_connection(listener.getsockname())
        target, _ = listener.accept()
    with source, target:
        yield source, target


def serve(target):
    thread = threading.Thread(target=serve_payloads, args=(target, PACE))
    thread.start()
    return thread


@pytest.mark.parametrize("size", [1, 400, PART_BYTES, PART_BYTES + 1, LARGE_BYTES])
def test_a_payload_arrives_whole(ends, size):
    source, target = ends
    thread = serve(target)
    found = send_payload(source, size, PACE)
    source.close()
    thread.join(timeout=200)
    assert (found.contact, found.size_bytes, found.error) == (Contact.CONNECTED, size, "")
    assert found.duration_s > 0
    assert found.sent > 0
    assert found.delivered_bytes is None
    assert not thread.is_alive(), "the target sees that the source is done"


def test_a_payload_ends_when_its_time_is_up(ends):
    source, target = ends
    thread = serve(target)
    found = send_payload(source, LARGE_BYTES, PayloadLimits(stall_s=60.0, send_s=0.0))
    source.close()
    thread.join(timeout=200)
    assert (found.contact, found.size_bytes) == (Contact.CONNECTED, PART_BYTES)


def test_segments_of_a_large_payload_are_counted(ends):
    source, target = ends
    thread = serve(target)
    found = send_large(source, PACE, 0.0)
    source.close()
    thread.join(timeout=200)
    assert found.contact is Contact.CONNECTED
    assert found.sent >= LARGE_BYTES // 65536


def test_a_target_that_takes_nothing(ends):
    """Its kernel takes what its buffer holds, and then no more."""
    source, _ = ends
    found = send_payload(source, 64 * 2**20, SHORT)
    assert (found.contact, found.error) == (Contact.NO_ANSWER, "no progress for 0.3 s")
    assert found.duration_s >= SHORT.stall_s, "how long it got on, to tell how fast it was"
    assert found.delivered_bytes > 0


def test_a_target_that_does_not_answer(ends):
    source, _ = ends
    found = send_payload(source, 400, SHORT)
    assert (found.contact, found.delivered_bytes) == (Contact.NO_ANSWER, 2 * NUMBER.size + 400)


@pytest.mark.parametrize("answer", [NUMBER.pack(400) + NUMBER.pack(1), os.urandom(8)], ids=["other sum", "garbage"])
def test_a_payload_that_arrives_damaged(ends, answer):
    source, target = ends
    target.sendall(answer)
    found = send_payload(source, 400, PACE)
    assert (found.contact, found.error) == (Contact.FAILED, "the data that arrived is not the data that was sent")


def test_a_target_that_hangs_up(ends):
    source, target = ends
    target.shutdown(socket.SHUT_WR)
    assert send_payload(source, 400, PACE).contact is Contact.RESET


def test_the_target_takes_no_part_over_the_limit(ends):
    source, target = ends
    source.sendall(NUMBER.pack(PART_BYTES + 1))
    with pytest.raises(Damaged, match="over the limit"):
        serve_payloads(target, PACE)


def test_the_target_does_not_wait_for_ever(ends):
    _, target = ends
    with pytest.raises(TimeoutError):
        serve_payloads(target, PayloadLimits(stall_s=0.05, send_s=1.0))


def test_a_target_that_is_busy_with_others(ends):
    source, _ = ends
    with pytest.raises(TargetBusy, match="busy with other nodes"):
        greet(source, b"hello", 5.0, 0.1)


def test_a_rate_counts_what_got_through():
    assert rate_of(Transfer(size_bytes=1000, contact=Contact.CONNECTED, duration_s=0.5)) == 2000
    assert rate_of(Transfer(size_bytes=1000, contact=Contact.NO_ANSWER)) == 0


def test_the_kernels_counts(ends):
    source, target = ends
    source.sendall(b"x" * 100)
    assert target.recv(100, socket.MSG_WAITALL) == b"x" * 100
    counts = read_tcp_counts(source)
    assert (counts.retransmitted, counts.needless) == (0, 0)
    assert counts.delivered_bytes in {100, 101}
    assert counts.sent == 1


def test_a_socket_of_which_the_kernel_counts_nothing():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        counts = read_tcp_counts(other)
    assert (counts.retransmitted, counts.delivered_bytes, counts.sent, counts.unacknowledged) == (None,) * 4
    assert counts.needless is None
