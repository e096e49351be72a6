"""Clock offsets are those of the shortest round trip, and right within the error that they tell."""

import itertools
import os
import shutil
import subprocess
import sys

import pytest

from ddpdoctor.exchange.clocks import ROUNDS, measure_clocks
from ddpdoctor.exchange.meeting import HostedMeeting, OwnPort, open_meeting
from ddpdoctor.exchange.store import ClockTimes

MS = 1_000_000


class FarServer:
    """A server whose clocks differ by fixed amounts, at the end of a way that takes given times there and back."""

    def __init__(self, trips, ahead_ns, wall_ahead_ns):
        self.now_ns = 5_000_000_000
        self._trips = iter(trips)
        self._ahead_ns, self._wall_ahead_ns = ahead_ns, wall_ahead_ns

    def read(self):
        """Return what the clocks of this side show."""
        return ClockTimes(self.now_ns + 10**18, self.now_ns)

    def now(self):
        there, back = next(self._trips)
        self.now_ns += there
        reported = ClockTimes(self.now_ns + 10**18 - self._wall_ahead_ns, self.now_ns - self._ahead_ns)
        self.now_ns += back
        return reported


@pytest.mark.parametrize("ahead_ns", [-7_000_000_000, 0, 123_456_789])
@pytest.mark.parametrize(
    "trips",
    [
        [(MS, MS)],
        [(30 * MS, 2 * MS), (2 * MS, 3 * MS), (MS, 90 * MS)],
        # All of the time on the way there: the worst case of the bound.
        [(10 * MS, 0)],
        [(0, 10 * MS)],
    ],
)
def test_the_offset_is_right_within_its_error(trips, ahead_ns):
    server = FarServer(itertools.cycle(trips), ahead_ns, -20_000_000_000)
    offset = measure_clocks(server, server.read)

    shortest = min(there + back for there, back in trips)
    assert offset.error_ns == shortest // 2 + 1
    assert abs(offset.monotonic_ns - ahead_ns) <= offset.error_ns
    assert abs(offset.wall_s + 20.0) <= offset.error_ns / 1e9 + 1e-6


def test_a_slow_way_is_asked_less_often():
    asked = []
    server = FarServer((asked.append(1) or (700 * MS, 700 * MS) for _ in range(ROUNDS)), 0, 0)
    assert abs(measure_clocks(server, server.read).monotonic_ns) <= 700 * MS
    assert len(asked) == 2


@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")
def test_a_real_clock_that_is_behind_is_seen_to_be():
    with HostedMeeting(0, b"token", one_host=True) as hosted:
        own = measure_clocks(open_meeting(OwnPort(("127.0.0.1",), hosted.port), b"token", 60))
        behind = subprocess.run(
            ["faketime", "-f", "-20s", sys.executable, "-c", BEHIND, str(hosted.port)],
            stdout=subprocess.PIPE, text=True, check=True, timeout=200, env={**os.environ, "DONT_FAKE_MONOTONIC": "1"},
        )  # fmt: skip
    wall_s, monotonic_ns, error_ns = map(float, behind.stdout.split())
    assert abs(own.monotonic_ns) <= own.error_ns
    assert abs(wall_s + 20) <= error_ns / 1e9 + 1e-3
    assert abs(monotonic_ns) <= error_ns


BEHIND = """
import sys
from ddpdoctor.exchange.clocks import measure_clocks
from ddpdoctor.exchange.meeting import OwnPort, open_meeting
offset = measure_clocks(open_meeting(OwnPort(("127.0.0.1",), int(sys.argv[1])), b"token", 60))
print(offset.wall_s, offset.monotonic_ns, offset.error_ns)
"""
