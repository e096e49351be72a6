"""The process that makes a real start: how its end is reported."""

import os
import signal
import time

import pytest

from ddpdoctor.probes.rendezvous.trial import StartProcess


def fork(end):
    """Return the handle of a process that reads its orders, hangs up, and then ends as ``end`` does."""
    (read, tell), (hear, write) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        os.close(write)
        return StartProcess(pid, tell, hear)
    os.close(tell)
    os.close(hear)
    os.read(read, 4096)
    end(write)
    os._exit(3)


def hang_up_late(write):
    os.close(write)
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("end", "limit_s", "error"),
    [
        (hang_up_late, 5, "the process ended with status 3"),
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), 5, "the process was killed by SIGKILL"),
        (lambda _: time.sleep(60), -0.9, "it did not end within -0.9 s"),
    ],
)
def test_the_end_of_a_process_that_reports_nothing(end, limit_s, error):
    assert fork(end).run(limit_s=limit_s)["error"] == error
