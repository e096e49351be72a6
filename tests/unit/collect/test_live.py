"""Where the record of a running job is, and what is asked of its watcher."""

import json
import os
import threading

import pytest

from ddpdoctor.collect import proc
from ddpdoctor.collect.run.live import find_record, is_watched, read_live
from ddpdoctor.launch.folders.run_file import write_record_place
from ddpdoctor.launch.watching.evidence import EvidenceTaker
from ddpdoctor.launch.watching.on_demand import ask_for_evidence
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.run import Run
from tests.scenarios.running import wait_for

HERE = os.uname().nodename


def make_run(folder, **changes):
    folder.mkdir(parents=True)
    body = {"format": "ddpdoctor-run", "version": 1, "host": HERE, **changes}
    (folder / "run.json").write_text(json.dumps(body))
    return folder


def test_a_record_on_a_local_disk_is_found_from_the_run_folder_on_that_host_only(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    local = make_run(tmp_path / "local", run_dir=str(run))
    for folder in (run, other):
        folder.mkdir()
        write_record_place(folder, local)
    assert find_record(run, HERE) == local
    assert find_record(run, "another") == run
    assert read_live(run).folder == local
    assert find_record(other, HERE) == other  # it comes from elsewhere: the record is not of its run


def test_a_record_that_is_gone_is_looked_for_in_the_run_folder(tmp_path):
    run = make_run(tmp_path / "run")
    write_record_place(run, tmp_path / "gone")
    assert find_record(run, HERE) == run


def test_the_watcher_is_known_by_its_pid_and_start():
    own = proc.read_process(os.getpid())
    assert is_watched(Run(watcher_pid=own.pid, watcher_ticks=own.start_ticks))
    assert not is_watched(Run(watcher_pid=own.pid, watcher_ticks=own.start_ticks + 1))
    assert is_watched(Run())  # of an older version it is not known


def test_members_that_record_in_one_place_are_known_before_the_first_has_told_of_them(tmp_path):
    run = make_run(tmp_path / "run")
    make_run(run / "nodes" / "1", node_rank=1)
    seen = read_live(run)
    assert [(node.number, node.host) for node in seen.members.nodes] == [(0, HERE), (1, HERE)]


def test_on_a_further_node_its_own_record_is_shown(tmp_path):
    base = tmp_path / "run"
    make_run(base / "nodes" / "1", host="another", node_rank=1)
    own = make_run(base / "nodes" / "2", node_rank=2)
    assert read_live(base).folder == own


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "ddpdoctor-run", "version": 1, "nproc": "x"}'])
def test_a_damaged_folder_is_refused(tmp_path, text):
    run = make_run(tmp_path / "run")
    (run / "run.json").write_text(text)
    with pytest.raises(UserError):
        read_live(run)


def test_a_damaged_note_costs_only_what_it_says(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("members.json", "replicas.json", "record.json", "end.json", "watch.json"):
        (run / name).write_text('{"nodes": 3')
    seen = read_live(run)
    assert (seen.members, seen.replicas, seen.end, seen.job.ranks) == (None, None, None, ())


def test_evidence_is_asked_for_once_and_answered_once(tmp_path):
    taker = EvidenceTaker(tmp_path)
    assert taker.dump_asked() == 0
    came = []
    asking = threading.Thread(target=lambda: came.append(ask_for_evidence(tmp_path, 100, lambda: True)))
    asking.start()
    assert wait_for(taker.dump_asked)
    taker.note_dumped(taker.dump_asked())
    asking.join()
    assert (came, taker.dump_asked()) == ([True], 0)


def test_nobody_answers_for_a_watcher_that_is_gone_or_too_slow(tmp_path):
    EvidenceTaker(tmp_path)
    assert not ask_for_evidence(tmp_path, 100, lambda: False)
    assert not ask_for_evidence(tmp_path, 0.1, lambda: True)
