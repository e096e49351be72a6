"""Makes what the fuzzer damages: run folders of several kinds, saved reports, bench files, checkpoints of each form."""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from ddpdoctor.cli.report import read_run
from ddpdoctor.report.formats import render_json
from tests import benches
from tests.fingerprints import write_job
from tests.fuzzing import Sample
from tests.synthetic import SITUATIONS, Job, write_folder, write_gathered

CRASHING = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
if dist.get_rank():
    raise RuntimeError("out of cheese")
dist.barrier()
"""
PRINTED = ("fc.weight", "fc.bias", "running_mean")


def make_runs(folder: Path) -> list[Sample]:
    """Make run folders without a report, of one host and of several, and the reports that they become."""
    samples = []
    for name in SITUATIONS:
        path = folder / name
        write_folder(path, Job(world=4, steps=3, situation=name, tp=2))
        samples.append(Sample(name=name, path=path, kind="run"))
    write_gathered(folder / "nodes", Job(world=4, steps=3, situation="stuck", tp=2), 2)
    samples.append(Sample(name="nodes", path=folder / "nodes", kind="run"))
    samples.append(Sample(name="replicas", path=_with_replicas(folder), kind="run"))
    for name in ("stuck", "crash", "replicas"):
        saved = folder / f"{name}.json"
        saved.write_text(render_json(read_run(folder / name)))
        samples.append(Sample(name=saved.name, path=saved, kind="run"))
    return samples


def _with_replicas(folder: Path) -> Path:
    """Make a run folder in which the replicas differ, as their ranks wrote it down."""
    path = folder / "replicas"
    write_folder(path, Job(world=2, steps=3, situation="healthy", tp=2))
    run = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**run, "check_every": 1, "allow_different": []}))
    points = {number: [[number, number, 1], [number, -number, 1]] for number in (1, 2, 3)}
    write_job(path / "prints", points, PRINTED)
    for ring, found in zip(sorted((path / "rings").iterdir()), sorted((path / "prints").iterdir()), strict=True):
        found.rename(found.with_name(f"{ring.stem}-0.prints"))
    return path


def make_real(folder: Path) -> list[Sample]:
    """Make what the real commands write: a job that crashed, with and without a report, and a report of each check."""
    files = [str(folder / name) for name in ("zip.pt", "whole.pt")]
    commands = {
        "real-crash": ("wrap", "--nproc-per-node", "2", str(_crashing(folder))),
        "real-env": ("check-env",),
        "real-diff": ("check-consistency", "--diff", files[0], files[0]),
        "real-checkpoint": ("check-checkpoint", *files),
        "real-rendezvous": ("check-rendezvous", "--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1"),
    }
    samples = []
    for name, (verb, *rest) in commands.items():
        path = folder / name
        command = [sys.executable, "-m", "ddpdoctor", verb, "--report-dir", str(path), *rest]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if not (path / "report.json").exists():
            print(f"{name} could not be made (status {ran.returncode}): {ran.stderr[-200:]}")
            continue
        saved = (path / "report.json").rename(folder / f"{name}.json")
        samples.append(Sample(name=saved.name, path=saved, kind="run"))
        if (path / "run.json").exists():
            samples.append(Sample(name=name, path=path, kind="run"))
    return samples


def _crashing(folder: Path) -> Path:
    script = folder / "train.py"
    script.write_text(CRASHING)
    return script


def make_benches(folder: Path) -> list[Sample]:
    """Make reports of `allreduce-bench`."""
    samples = []
    for name, report in (("bench", benches.everything()), ("hung", benches.hung()), ("one", benches.one_rank())):
        path = folder / f"bench-{name}.json"
        path.write_text(render_json(replace(report, command=("ddpdoctor", "allreduce-bench"))))
        samples.append(Sample(name=path.name, path=path, kind="bench"))
    return samples


def make_checkpoints(folder: Path) -> list[Sample]:
    """Make checkpoints of each form that is read."""
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(model, folder / "whole.pt")
    _save_safetensors(folder / "plain.safetensors")
    _save_distributed(folder / "distributed")
    names = ("zip.pt", "legacy.pt", "whole.pt", "plain.safetensors", "distributed")
    return [Sample(name=name, path=folder / name, kind="checkpoint") for name in names]


def _save_safetensors(path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "a.bias": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(40))


def _save_distributed(folder: Path) -> None:
    import torch
    from torch.distributed import checkpoint

    checkpoint.save({"model": {"weight": torch.ones(2, 3)}, "step": 3}, checkpoint_id=str(folder), no_dist=True)
