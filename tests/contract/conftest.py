"""The command line as a user has it, in an empty folder."""

import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from ddpdoctor.cli.app import main
from tests import forking

ROOT = Path(__file__).parents[2]
CLEARED = re.compile(
    r"^(DDPDOCTOR|SLURM|PET|TORCHELASTIC|TORCH_DISTRIBUTED|MASTER|OMPI|PMI|NCCL|GLOO)_"
    r"|^(RANK|WORLD_SIZE|LOCAL_RANK|COLUMNS|NO_COLOR)$"
)


def environment(folder, more):
    clean = {name: value for name, value in os.environ.items() if not CLEARED.search(name)}
    return {**clean, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def run_in(monkeypatch, capfd):
    """Run ddpdoctor in a folder outside any launcher, in this process, which forgets what it imported from there."""

    def run(folder, *words, **env):
        loaded = set(sys.modules)
        capfd.readouterr()
        with (
            monkeypatch.context() as patch,
            mock.patch.dict(os.environ, environment(folder, env), clear=True),
            open(os.devnull) as nothing,  # noqa: PTH123
        ):
            patch.chdir(folder)
            for place, name, value in (
                (sys, "argv", ["ddpdoctor", *map(str, words)]), (sys, "path", [*sys.path]), (sys, "stdin", nothing),
                (tempfile, "tempdir", str(folder)),
            ):  # fmt: skip
                patch.setattr(place, name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        for name in set(sys.modules) - loaded:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]
        return subprocess.CompletedProcess(words, ended.value.code or 0, *capfd.readouterr())

    return run


@pytest.fixture
def run(tmp_path, run_in):
    return partial(run_in, tmp_path)


@pytest.fixture
def fork(tmp_path):
    """Run ddpdoctor in a process of its own."""

    def run(*words, **env):
        return forking.run("-m", "ddpdoctor", *words, cwd=tmp_path, env=environment(tmp_path, env))

    return run
