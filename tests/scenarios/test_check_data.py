"""`check-data --dataset` on real ranks: what they share is counted exactly, and reported once."""

import json
import subprocess
import sys

import jsonschema
import pytest

from .running import SCHEMA, clean_environment, free_port, grids_of

pytestmark = pytest.mark.usefixtures("preloaded_python")

DATA = """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset
samples = [float(number) for number in range(455)]
def with_seeds():
    return DataLoader(samples, 8, sampler=DistributedSampler(samples, seed=dist.get_rank()))
def split_by_hand():
    print("a line of the user's")
    return DataLoader(Subset(samples, range(dist.get_rank(), 455, dist.get_world_size())), 3)
"""
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "ddpdoctor", "check-data"),
    "own": ("-m", "ddpdoctor", "check-data", "--world-size", "2"),
}


@pytest.mark.parametrize(("launcher", "function"), [("torchrun", "with_seeds"), ("own", "split_by_hand")])
def test_ranks_ask_their_loaders_and_one_report_comes_of_it(tmp_path, launcher, function):
    (tmp_path / "data.py").write_text(DATA)
    words = [sys.executable, *LAUNCHERS[launcher], "--dataset", f"data:{function}", "--format", "json"]
    if launcher == "torchrun":
        words.insert(3, f"--master-port={free_port()}")
    done = subprocess.run(
        words, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    first = report["data"]["drawn"]["passes"][0]
    ((own, both), (_, other)) = first["overlaps"]
    assert both == first["shared"]
    assert own + other - both == first["unique"]
    assert grids_of(report)["samples that two ranks both drew in pass 1"].cells[0][1].text == str(both)

    if function == "with_seeds":
        assert done.returncode == 1
        assert report["verdict"]["code"] == "DD703"
        assert (first["shared"], first["missed"]) == (118, 117)
    else:
        assert done.returncode == 0
        assert [one for one in report["findings"] if one["severity"] != "info"] == []
        assert (first["unique"], first["shared"], first["missed"]) == (455, 0, 0)
        assert done.stderr.count("a line of the user's") == 2
