"""A job of several nodes is read from the folder of the first as if all its ranks had been there."""

import json
import shutil

import pytest

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.diagnose.progress import judge_folder
from tests.synthetic import SITUATIONS, Job, S, write_folder, write_gathered

HOUR = 3600 * S


def named(judgment):
    return [(finding.kind, finding.ranks) for finding in judgment.findings]


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def see(folder, number, **fields):
    """Change what the first node saw of another one."""
    seen = json.loads((folder / "nodes.json").read_text())
    seen["nodes"][number] |= fields
    (folder / "nodes.json").write_text(json.dumps(seen))


@pytest.mark.parametrize("situation", SITUATIONS)
def test_nodes_whose_clocks_are_hours_apart_are_judged_as_one_host(tmp_path, situation):
    job = Job(world=32, steps=20, situation=situation, culprit=9)
    write_folder(tmp_path / "one", job)
    write_gathered(tmp_path / "four", job, 4, skew_ns=HOUR)
    assert named(judge_folder(tmp_path / "four")) == named(judge_folder(tmp_path / "one"))


def test_times_are_those_of_the_first_node(tmp_path):
    job = Job(world=4, steps=20, situation="stuck")
    write_folder(tmp_path / "one", job)
    write_gathered(tmp_path / "two", job, 2, skew_ns=HOUR)
    one, two = read_job(tmp_path / "one"), read_job(tmp_path / "two")
    assert [rank.started_ns for rank in two.ranks] == [rank.started_ns for rank in one.ranks]
    assert [rank.last_progress_ns for rank in two.ranks] == [rank.last_progress_ns for rank in one.ranks]
    assert [rank.host for rank in two.ranks] == ["node0", "node0", "node1", "node1"]
    assert two.nnodes == 2
    assert [seen.host for seen in two.elsewhere] == ["node1"]


def test_what_a_node_recorded_in_a_shared_folder_counts_where_it_sent_nothing(tmp_path):
    write_gathered(tmp_path, Job(world=4, steps=20, situation="stuck"), 2)
    shutil.copytree(tmp_path / "nodes" / "1", tmp_path / "gathered" / "1")
    change(tmp_path / "gathered" / "1" / "run.json", host="sent")
    assert [seen.host for seen in read_job(tmp_path).elsewhere] == ["sent"]
    shutil.rmtree(tmp_path / "gathered")
    assert [seen.host for seen in read_job(tmp_path).elsewhere] == ["node1"]


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": "other"}'])
def test_a_node_whose_records_cannot_be_read_is_not_there(tmp_path, damage):
    write_gathered(tmp_path, Job(world=4, steps=20, situation="stuck"), 2)
    (tmp_path / "nodes" / "1" / "run.json").write_text(damage)
    job = read_job(tmp_path)
    assert [rank.rank for rank in job.ranks] == [0, 1]
    assert [node.gathered for node in job.members.nodes] == [True, False]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"expected": "x"}'])
def test_a_list_of_nodes_that_cannot_be_read_leaves_the_first_alone(tmp_path, text):
    write_gathered(tmp_path, Job(world=4, steps=20, situation="stuck"), 2)
    (tmp_path / "nodes.json").write_text(text)
    assert read_job(tmp_path).members is None


def test_the_stop_of_any_node_is_that_of_the_job(tmp_path):
    """A rank of the first node that ends after another node's launcher began to stop the job is no cause."""
    write_gathered(tmp_path, Job(world=4, steps=20, situation="crash", culprit=2), 2, skew_ns=HOUR)
    other = tmp_path / "nodes" / "1" / "watch.json"
    ended_ns = min(row["ended_ns"] for row in json.loads(other.read_text())["processes"].values())
    change(other, stopping_since_ns=ended_ns - 10 * S)
    job = read_job(tmp_path)
    assert job.stopping_since_ns == ended_ns - 10 * S - HOUR
    assert all(rank.after_stop for rank in job.ranks)


def test_a_node_that_left_badly_makes_a_failed_job(tmp_path):
    write_gathered(tmp_path, Job(world=4, steps=20, situation="healthy"), 2)
    see(tmp_path, 1, presence="left", status=3)
    assert read_job(tmp_path).launcher_status == 3
