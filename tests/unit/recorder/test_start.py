"""Which processes are recorded as ranks from their first line on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddpdoctor.recorder

BOOTSTRAP = Path(ddpdoctor.recorder.__file__).parent / "bootstrap"
SAY = "import sys\nprint(int(sys._ddpdoctor_recorder.is_rank), flush=True)\n"
START = "import subprocess, sys\nsubprocess.run([sys.executable, sys.argv[1]], check=True)\n"
ME = str(os.getpid())


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SAY)
    (tmp_path / "rings").mkdir()
    (tmp_path / "evidence").mkdir()
    return file


def said(script, *words, **env):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(BOOTSTRAP), "DDPDOCTOR_RUN": str(script.parent), **env}
    command = [sys.executable, *(words or [str(script)])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=script.parent)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("env", "is_rank"),
    [
        ({"RANK": "0", "DDPDOCTOR_AGENT": ME}, True),
        ({"DDPDOCTOR_AGENT": ME}, False),
        ({"RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_RANK": "1"}, True),
        ({"PMI_RANK": "1"}, True),
        ({"SLURM_PROCID": "0"}, True),
        ({}, False),
        ({"DDPDOCTOR_WATCHER": ME}, True),
        ({"DDPDOCTOR_WATCHER": "1"}, False),
    ],
)
def test_a_number_of_its_own_makes_a_rank_and_so_does_being_the_command(env, is_rank, script):
    assert said(script, **env) == [str(int(is_rank))]


@pytest.mark.parametrize("env", [{"RANK": "0"}, {"RANK": "0", "DDPDOCTOR_AGENT": ME}, {"DDPDOCTOR_WATCHER": ME}])
def test_what_a_rank_starts_is_none(env, script):
    starter = script.with_name("starter.py")
    starter.write_text(SAY + START)
    assert said(script, str(starter), str(script), **env) == ["1", "0"]


def test_a_launcher_that_has_a_number_gives_its_children_others(script):
    starter = script.with_name("starter.py")
    starter.write_text("import os\nos.environ['RANK'] = '5'\n" + START)
    assert said(script, str(starter), str(script), RANK="0") == ["1"]


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed"])
def test_a_launcher_in_a_batch_job_is_no_rank(name, script):
    launcher = script.with_name(name)
    launcher.write_text(SAY)
    assert said(script, "-u", str(launcher), SLURM_PROCID="0", DDPDOCTOR_WATCHER=ME) == ["0"]
