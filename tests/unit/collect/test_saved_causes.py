"""What a run folder keeps of causes comes back as it was, and what is damaged is absent."""

import json

from ddpdoctor.collect.proc import Process
from ddpdoctor.collect.rank.notes import read_process_causes
from ddpdoctor.collect.recorded import read_or_none
from ddpdoctor.collect.run.evidence import load
from ddpdoctor.collect.run.nccl_warnings import keep_users_logs, read_warnings
from ddpdoctor.launch.watching.causes import CausesSeen
from ddpdoctor.model.causes import HostCauses, Memory, NcclLine, ProcessCauses
from ddpdoctor.model.node import Node

MIB = 2**20


def process(pid, rss, ppid=1, state="S"):
    return Process(pid=pid, ppid=ppid, state=state, start_ticks=5, cpu_ticks=0, name="python", rss_bytes=rss)


def test_memory_is_kept_at_its_most_and_at_its_last():
    seen = CausesSeen()
    sizes = ((10, ()), (90, (process(8, 5 * MIB), process(9, 7 * MIB))), (40, (process(8, MIB),)), (0, ()))
    for second, (used, below) in enumerate(sizes):
        seen.follow(process(7, used * MIB), below, second * 10**9)
    found = read_or_none(ProcessCauses, json.loads(json.dumps(seen.row(7, 5))))
    assert found.memory == Memory(used_bytes=40 * MIB, most_bytes=90 * MIB)
    assert (found.children_memory.most_bytes, found.children_count) == (12 * MIB, 2)
    assert seen.row(7, 6) is None


def test_the_host_is_looked_at_and_comes_back():
    seen = CausesSeen()
    seen.follow_host(10**12)
    found = read_or_none(HostCauses, json.loads(json.dumps(seen.host_row())))
    assert 0 < found.machine.used_bytes < found.machine.limit_bytes


def test_notes_of_a_rank_are_read():
    notes = [
        {"k": "child_end", "pid": 8, "code": -9},
        {"k": "child_end", "pid": 9, "code": 0},
        {"k": "raised", "memory": {"resident": [1, 2], "address_space": [9, 8], "shared_memory": None,
                                   "devices": [[0, 1, 2, 3, 4]]}},
        {"k": "raised", "memory": None},
    ]  # fmt: skip
    found = read_process_causes(None, notes, {"lock_path": "/x/lock"})
    assert [(child.signal, child.exit_code) for child in found.lost_children] == [("SIGKILL", None), (None, 0)]
    assert (found.at_error.memory.most_bytes, found.at_error.address_space.limit_bytes) == (2, 9)
    assert found.at_error.devices[0].most_reserved_bytes == 4
    assert found.lock_path == "/x/lock"


def test_what_is_damaged_or_absent_is_absent(tmp_path):
    assert read_or_none(ProcessCauses, {"memory": 3, "children_count": 2}) == ProcessCauses(children_count=2)
    assert read_process_causes(None, [], {}) is None
    assert read_or_none(HostCauses, "x") is None
    (tmp_path / "machine.json").write_text('{"host": 3}')
    assert load(Node, tmp_path / "machine.json") is None


LOG = """\
node3:4711:4720 [0] transport/net_ib.cc:12 NCCL WARN NET/IB : Got completion with error 12
node3:4711:4720 [0] NCCL INFO Channel 00 : 0[0] -> 1[1]
[2026-11-21 10:00:00] node3:4711:4721 [1] misc/socket.cc:5 NCCL WARN Connection timed out
NCCL WARN a line without a head
"""


def test_nccls_warnings_are_read_from_the_folder_and_the_users_own_files(tmp_path):
    run, own = tmp_path / "run", tmp_path / "own"
    (run / "nccl").mkdir(parents=True)
    own.mkdir()
    (run / "nccl" / "node3.4711.log").write_text(LOG)
    (own / "log.node3.4800").write_text(LOG.replace("4711:", "4800:"))
    keep_users_logs(run, f"{own}/log.%h.%p")
    found = read_warnings(run)
    assert found[0] == NcclLine(pid=4711, source="transport/net_ib.cc:12", text="NET/IB : Got completion with error 12")
    assert [line.pid for line in found].count(4800) == 2
    assert len(found) == 5
