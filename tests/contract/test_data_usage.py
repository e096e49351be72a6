"""`check-data` and `check-checkpoint` as a user meets them on the command line."""

import json

import jsonschema
import pytest

from tests import forking
from tests.scenarios.running import SCHEMA, cell_of, grids_of

DATA = """
from torch.utils.data import DataLoader, DistributedSampler
samples = [float(number) for number in range(30)]
def make():
    print("a line of the user's")
    return DataLoader(samples, 4, sampler=DistributedSampler(samples))
def fail(): raise ValueError("no such data")
"""
SAVE = """
import torch
model = torch.nn.Linear(4, 2)
torch.save(model.state_dict(), "sound.pt")
torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, "wrapped.pt")
content = open("sound.pt", "rb").read()
open("cut.pt", "wb").write(content[:-100])
"""
MODEL = "import torch\ndef build(): return torch.nn.Linear(4, 2)\n"


def plan(*more):
    return ("check-data", "--samples", 455, "--world-size", 2, "--batch-size", 8, *more)


def test_the_arithmetic_is_drawn_in_a_pipe_and_needs_no_torch(run):
    done = run(*plan(), PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}

    assert done.returncode == 0
    assert "torch" not in imported
    assert done.stdout == (
        "ddpdoctor: no problem found\n"
        "  1 note; checks: 4 passed, 1 skipped (-v shows each)\n"
        "\n"
        "455 samples, 2 ranks, batches of 8: split by DistributedSampler, shuffled\n"
        "\n"
        "  ranks   samples  repeated  batches  last batch  left out\n"
        "  0           228         0       29           4         0\n"
        "  1           228         1       29           4         0\n"
        "  in all      456         1       58                     0\n"
        "\n"
        "an epoch: 456 samples in batches, 455 of 455 different, 1 repeated, 0 missed\n"
    )


def test_every_format_is_written_and_a_saved_report_is_drawn_again(run, tmp_path):
    report = json.loads(run(*plan("--format", "json", "--report-dir", tmp_path / "saved")).stdout)
    jsonschema.validate(report, SCHEMA)

    assert report["data"]["shares"]["unique"] == 455
    assert cell_of(grids_of(report)["samples that two ranks both get in an epoch"], "0", "1") == "1"
    said = run(*plan()).stdout
    assert run("report", "saved").stdout == said.replace("(-v shows each)", "(-v shows each); report in saved")
    assert "228" in run(*plan("--format", "markdown")).stdout
    assert "<testsuite" in run(*plan("--format", "junit")).stdout


def test_the_exit_status_follows_what_was_found(run):
    assert run(*plan("--no-sampler")).returncode == 1
    assert run(*plan("--no-sampler", "--fail-on", "never")).returncode == 0
    assert run(*plan("--fail-on", "info")).returncode == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("check-data",), "--samples, or --dataset"),
        (("check-data", "--samples", "4"), "--samples needs --world-size"),
        (("check-data", "--samples", "0", "--world-size", "2"), "--samples"),
        ((*plan(), "--split", "--no-sampler"), "not both"),
        ((*plan(), "--split", "--sampler-drop-last"), "--sampler-drop-last"),
        (("check-data", "--dataset", "data:make", "--drop-last"), "--drop-last cannot be used with --dataset"),
        (("check-data", "--dataset", "data.py:make"), "data:make"),
        (("check-data", "--dataset", "data:fail"), "ValueError: no such data"),
        (("check-data", "--dataset", "data:make", "--timeout", "soon"), "--timeout is 'soon'"),
        (("check-checkpoint",), "FILE"),
        (("check-checkpoint", "gone.pt"), "there is no gone.pt"),
        (("check-checkpoint", "."), "has no checkpoint"),
        (("check-checkpoint", "data.py", "--model", "data:fail"), "ValueError: no such data"),
    ],
)
def test_wrong_use_is_status_2_with_what_to_do_and_no_traceback(run, tmp_path, args, said):
    (tmp_path / "data.py").write_text(DATA)
    done = run(*args)

    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_loader_is_asked_without_a_launcher_and_its_lines_stay_off_stdout(run, tmp_path):
    (tmp_path / "data.py").write_text(DATA)
    done = run("check-data", "--dataset", "data:make", "--format", "json", "--epochs", 1)
    report = json.loads(done.stdout)

    jsonschema.validate(report, SCHEMA)
    assert done.returncode == 0
    assert "a line of the user's" in done.stderr
    assert report["data"]["drawn"]["passes"][0]["unique"] == 30


def test_checkpoints_are_distinguished(run, tmp_path):
    (tmp_path / "save.py").write_text(SAVE)
    assert forking.run("save.py", cwd=tmp_path).returncode == 0
    (tmp_path / "model.py").write_text(MODEL)
    sound = run("check-checkpoint", "sound.pt", "--model", "model:build", "--fail-on", "info")
    wrapped = run("check-checkpoint", "wrapped.pt", "--model", "model:build", "--format", "json")
    cut = run("check-checkpoint", "cut.pt")

    assert (sound.returncode, sound.stderr) == (0, "")
    assert "no problem found\n  checks: 9 passed, 2 skipped" in sound.stdout
    assert wrapped.returncode == cut.returncode == 1
    report = json.loads(wrapped.stdout)
    jsonschema.validate(report, SCHEMA)
    assert report["verdict"]["code"] == "DD713"
    assert report["verdict"]["tensor"] == "module.weight"
    assert "error  DD712 checkpoint-truncated" in cut.stdout
    (grid,) = grids_of(report).values()
    assert cell_of(grid, "read", "wrapped.pt") == "whole"
