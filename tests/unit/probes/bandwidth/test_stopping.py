"""What the rank that reports says of the processes beside it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from ddpdoctor.model.bandwidth import Ending, Stop
from ddpdoctor.probes.bandwidth.alarm import Alarm
from ddpdoctor.probes.bandwidth.positions import take_position
from ddpdoctor.probes.bandwidth.processes import Neighbours, read_home, read_stat
from ddpdoctor.probes.bandwidth.stopping import Reporting, stop_alone
from ddpdoctor.probes.bandwidth.tracker import Tracker
from tests.scenarios.running import wait_for


def test_a_process_that_died_after_the_position_was_taken_is_seen():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own, stat = read_home(), read_stat(child.pid)
    neighbours = Neighbours(own)
    neighbours.add(0, replace(own, pid=child.pid, started_ticks=stat.started_ticks))
    position = take_position(1, Tracker(), None, neighbours.states(), neighbours.ends)
    told: list[Stop] = []

    child.kill()
    assert wait_for(lambda: 0 in neighbours.gone())
    reporting = Reporting(rank=1, members=(), neighbours=neighbours, finish=lambda stop: told.append(stop) or 1)
    status = stop_alone(reporting, Alarm(ending=Ending.FAILED, rank=1, phase="measure", signal=None), position)
    child.communicate()
    neighbours.close()

    assert status == 1
    assert position.states["0"] not in {"Z", ""}
    assert told[0].positions[0].states == {"0": "Z"}
    assert told[0].positions[0].ends == {"0": "SIGKILL"}
