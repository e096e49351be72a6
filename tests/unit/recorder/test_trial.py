"""A trial switches settings of DDP in a running job, changes no parameter by that, and leaves nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.recorder.tuning.plan import LEFT_OUT, MEASURED, MEASURED_IN_LAUNCH, MIB, choose_caps, order_blocks
from ddpdoctor.recorder.tuning.trial import WARM_UP
from tests.preloaded import preloaded
from tests.scenarios.running import clean_environment, free_port

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("trial_job.py")
KEEPING = "bucket_cap,gradient_as_bucket_view,static_graph,buffers_off,unreduced"
"""Settings that change no parameter, until the reduction is left out."""
KEPT = "the checkpoint of an earlier run"


def run_job(folder, rounds, steps, only="", setting=""):
    checkpoint = folder / "model.pt"
    checkpoint.write_text(KEPT)
    for name in ("rings", "evidence"):
        (folder / name).mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", str(JOB),
        str(steps), str(checkpoint),
    ]  # fmt: skip
    path = f"{ROOT / 'ddpdoctor' / 'recorder' / 'bootstrap'}{os.pathsep}{ROOT}"
    trial = {
        "DDPDOCTOR_TUNE_ROUNDS": str(rounds), "DDPDOCTOR_TUNE_ONLY": only, "DDPDOCTOR_TUNE_SETTING": setting
    }  # fmt: skip
    env = clean_environment(PYTHONPATH=path, DDPDOCTOR_RUN=str(folder), **trial)
    with preloaded():
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1], checkpoint


def lines_of(folder, rank):
    return [json.loads(line) for line in (folder / "tuning" / f"{rank}.jsonl").read_text().splitlines()]


def test_parameters_are_those_of_a_job_without_switches_until_the_reduction_is_left_out(tmp_path):
    folders = [tmp_path / name for name in ("tried", "plain")]
    for folder in folders:
        folder.mkdir()
    tried, kept = run_job(folders[0], rounds=1, steps=1000, only=KEEPING)
    lines = lines_of(folders[0], 0)
    settings = lines[0]["plan"]
    order = [line["setting"] for line in lines if "setting" in line]
    assert sorted(order) == sorted(settings)
    assert {*KEEPING.split(","), "base", "again"} == {name.partition("=")[0] for name in settings}
    together = WARM_UP - 1 + (LEFT_OUT + MEASURED) * order.index("unreduced")
    assert together > WARM_UP + LEFT_OUT + MEASURED  # at least one switch comes before
    plain, _ = run_job(folders[1], rounds=0, steps=together)
    assert tried[:together] == plain[:together]
    assert all(len(line["steps_ns"]) == MEASURED for line in lines if "setting" in line)
    steps = WARM_UP + (LEFT_OUT + MEASURED) * len(order)
    assert [line for rank in (0, 1) for line in lines_of(folders[0], rank) if "end" in line] == [
        {"end": "done", "steps": steps}
    ] * 2
    assert len(tried) == steps  # the script would have gone on to 1,000
    assert kept.read_text() == KEPT


def test_a_launch_with_one_setting_measures_some_steps_and_ends_on_all_ranks(tmp_path):
    trained, kept = run_job(tmp_path, rounds=1, steps=1000, setting="gradient_as_bucket_view")
    steps = WARM_UP + MEASURED_IN_LAUNCH
    assert len(trained) == steps
    for rank in (0, 1):
        launch, block, end = lines_of(tmp_path, rank)
        assert launch == {"launch": "gradient_as_bucket_view", "fits": [], "forwards": 1, "needs": steps}
        assert len(block["steps_ns"]) == MEASURED_IN_LAUNCH
        assert end == {"end": "done"}
    assert kept.read_text() == KEPT


@pytest.mark.parametrize(
    ("gradient_mib", "present_mib", "caps_mib"),
    [
        (16, 25, [1, 2, 4, 16]),
        (16, 4, [1, 2, 16]),
        (100, 25, [8, 16, 32, 128]),
        (0.7, 0.0005, [0.25, 1]),
        (0.01, 25, [0.25]),
    ],
)
def test_caps_are_those_that_give_other_numbers_of_buckets(gradient_mib, present_mib, caps_mib):
    assert choose_caps(int(gradient_mib * MIB), int(present_mib * MIB)) == [int(cap * MIB) for cap in caps_mib]


def test_each_round_has_every_setting_once_and_all_ranks_have_the_same_order():
    blocks = order_blocks(["base", "again", "views"], 4)
    assert blocks == order_blocks(["base", "again", "views"], 4)
    for number in range(4):
        assert sorted(setting for one, setting in blocks if one == number) == ["again", "base", "views"]
    assert len({tuple(setting for one, setting in blocks if one == number) for number in range(4)}) > 1
