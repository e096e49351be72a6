"""Data that is shared out badly is found, in jobs that finish; data that is shared out well gives no alarm."""

import json
from pathlib import Path

import jsonschema
import pytest

from tests.scenarios.running import JOBS, PATIENT, SCHEMA, free_port, grids_of, python, run

pytestmark = pytest.mark.usefixtures("preloaded_python")

BADLY = "data_shared_badly"
WELL = "data_shared_out"


def marked() -> dict[int, tuple[str, list[int]]]:
    """Return by line which kind of fault a job has there, and the ranks to blame for it."""
    found = {}
    for number, line in enumerate((JOBS / f"{BADLY}.py").read_text().splitlines(), start=1):
        _, mark, words = line.partition("  # FAULT ")
        if mark:
            kind, _, rank = words.partition(" of rank ")
            found[number] = (kind, [int(rank)] if rank else [0, 1, 2])
    return found


@pytest.mark.kept
def test_each_way_to_share_out_badly_is_found_at_its_line(tmp_path: Path) -> None:
    ran = run(BADLY, tmp_path, "--debug-level", "OFF", *PATIENT)
    assert ran.report["job"]["status"] == "finished", ran.stderr
    found = {finding["where"][0]["line"]: finding for finding in ran.report["findings"]}
    assert {line: (finding["kind"], finding["ranks"]) for line, finding in found.items()} == marked()
    assert len(ran.report["findings"]) == len(found)
    for finding in found.values():
        assert finding["severity"] == "error"
        assert sorted({place["rank"] for place in finding["where"]}) == finding["ranks"]
        assert {Path(place["file"]).name for place in finding["where"]} == {f"{BADLY}.py"}
    (stray,) = (finding for finding in found.values() if "another sampler" in finding["summary"])
    assert len({place["line"] for place in stray["where"]}) == 2
    assert ran.report["verdict"]["code"] == "DD701"
    assert ran.status == 0
    grid = grids_of(ran.report)["what ranks took from loaders"]
    named = [{place["line"] for place in finding["where"]} for finding in ran.report["findings"]]
    drawn = {int(row.partition(":")[2].partition(",")[0]) for row in grid.rows}
    assert all(drawn & lines for lines in named)
    assert drawn <= set().union(*named)


@pytest.mark.kept
def test_no_way_to_share_out_well_gives_an_alarm(tmp_path: Path) -> None:
    ran = run(WELL, tmp_path, "--debug-level", "OFF", *PATIENT, ranks=2)
    assert ran.report["job"]["status"] == "finished", ran.stderr
    assert ran.report["findings"] == []
    outcomes = {check["code"]: check["outcome"] for check in ran.report["checks"] if check["code"].startswith("DD7")}
    assert outcomes == dict.fromkeys(("DD701", "DD702", "DD703", "DD704"), "passed")


@pytest.mark.kept
def test_ranks_that_run_out_of_batches_support_the_verdict(tmp_path: Path) -> None:
    ran = run("mismatch_uneven", tmp_path, "--debug-level", "OFF")
    assert ran.report["verdict"]["kind"] == "mismatch"
    (uneven,) = (finding for finding in ran.report["findings"] if finding["code"] == "DD704")
    assert (uneven["ranks"], uneven["severity"]) == ([2], "error")
    assert "batches of pass 1: 11 on ranks 0 and 1, 10 on rank 2" in uneven["evidence"]


# `check-data --dataset` on real ranks: what they share is counted exactly, and reported once.


DATA = """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
samples = [float(number) for number in range(455)]
def with_seeds():
    return DataLoader(samples, 8, sampler=DistributedSampler(samples, seed=dist.get_rank()))
"""
LATE = """
import os, time
if os.environ.get("RANK") == "1":
    import torch.distributed as dist
    def join_late(*given, join=dist.init_process_group, **options):
        join(*given, **options)
        time.sleep(1)
        open("joined", "w").close()
    dist.init_process_group = join_late
"""
EARLY = """
import os
from torch.utils.data import DataLoader, DistributedSampler
def all_have_joined():
    assert os.path.exists("joined")
    return DataLoader([0.0, 1.0], sampler=DistributedSampler([0.0, 1.0]))
"""


def check_data(folder, function, *options, front=(), **env):
    words = ("-m", "ddpdoctor", "check-data", *options, "--dataset", f"data:{function}", "--format", "json")
    return python(*front, *words, cwd=folder, **env)


@pytest.mark.cold  # a forked Python does not import sitecustomize
def test_no_rank_leaves_the_group_before_all_have_joined(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LATE)
    (tmp_path / "data.py").write_text(EARLY)
    done = check_data(tmp_path, "all_have_joined", "--world-size=2", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_group_that_cannot_be_created_is_no_defect(tmp_path):
    (tmp_path / "data.py").write_text(DATA)
    done = check_data(tmp_path, "with_seeds", "--world-size=2", GLOO_SOCKET_IFNAME="absent0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no process group could be created: " in done.stderr
    assert "absent0" in done.stderr


def test_ranks_ask_their_loaders_and_one_report_comes_of_it(tmp_path):
    (tmp_path / "data.py").write_text(DATA)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    done = check_data(tmp_path, "with_seeds", front=torchrun)
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    first = report["data"]["drawn"]["passes"][0]
    ((own, both), (_, other)) = first["overlaps"]
    assert both == first["shared"]
    assert own + other - both == first["unique"]
    assert grids_of(report)["samples that two ranks both drew in pass 1"].cells[0][1].text == str(both)

    assert (done.returncode, report["verdict"]["code"]) == (1, "DD703")
    assert (first["shared"], first["missed"]) == (118, 117)
