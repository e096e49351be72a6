"""The callbacks of frameworks: they watch each training, and give the framework's own log what was found."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.scenarios.running import free_port, marked_lines, python, words_of

pytestmark = pytest.mark.usefixtures("preloaded_python")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


def run(script: str, *words: str, front: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    port = (f"--master-port={free_port()}",) if front else ()
    done = python(*front, *port, *words_of(script), *words, TRANSFORMERS_VERBOSITY="warning")
    print(done.stdout, done.stderr)
    return done


def codes(folder: Path) -> list[str]:
    return [finding["code"] for finding in json.loads((folder / "report.json").read_text())["findings"]]


def test_lightnings_logger_gets_the_verdict_of_a_training_that_failed(tmp_path: Path) -> None:
    done = run("watched_lightning", str(tmp_path))

    assert (done.returncode != 0, codes(tmp_path / "good"), codes(tmp_path / "bad")[:1]) == (True, [], ["DD604"])
    good, bad = (tmp_path / "logs" / name / "hparams.yaml" for name in ("good", "bad"))
    logged = yaml.safe_load(bad.read_text())["ddpdoctor"]
    assert (good.exists(), "DD604 crash, rank 1" in logged) == (False, True)
    assert f"frameworks.py:{marked_lines('watched_lightning')[0]}" in logged


@pytest.mark.alone
@pytest.mark.nightly
def test_the_history_of_transformers_gets_the_verdict_of_a_slow_training(tmp_path: Path) -> None:
    done = run("watched_transformers", str(tmp_path), front=TORCHRUN)

    assert sorted(line for line in done.stdout.splitlines() if line[:1] in "01" and line) == [
        "0 bad True", "0 good False", "1 bad False", "1 good False",
    ]  # fmt: skip
    assert (done.returncode, codes(tmp_path / "good"), codes(tmp_path / "bad")) == (0, [], ["DD610"])


@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.parametrize(("pace", "found"), [("even", []), ("slow", ["DD610"])])
def test_accelerates_log_gets_the_verdict_of_a_slow_training(tmp_path: Path, pace: str, found: list[str]) -> None:
    done = run("watched_accelerate", str(tmp_path / "run"), pace, front=TORCHRUN)

    assert (done.returncode, codes(tmp_path / "run")) == (0, found)
    # Once from the watcher, and once from the log.
    assert done.stderr.count("explain DD610") == 2 * len(found)
