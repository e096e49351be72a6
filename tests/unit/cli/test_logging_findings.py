"""``--log-findings`` where a log cannot be written: a message that says why."""

from pathlib import Path

import pytest

from ddpdoctor.cli.log_writers import Entry
from ddpdoctor.cli.logging_findings import _write
from ddpdoctor.model.loggers import Logger

ENTRY = Entry(verdict="rank 1 died (DD605)", step=7, has_finished=False, text="# report")


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    logger = Logger(name="tensorboard", place={"folder": str(tmp_path / "gone")})
    assert _write(logger, ENTRY) == f"tensorboard did not log the findings: its folder {tmp_path / 'gone'} is gone"


def test_a_run_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = {"folder": str(tmp_path), "id": "no-such-run", "tracking_uri": (tmp_path / "store").as_uri()}
    problem = _write(Logger(name="mlflow", place=place), ENTRY)
    assert problem.startswith("mlflow did not log the findings: ")
    assert "no-such-run" in problem


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's Python finds a wandb that cannot be imported."""
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    place = {"folder": str(tmp_path), "id": "run7", "project": "faces", "entity": "", "mode": "offline", "base_url": ""}
    problem = _write(Logger(name="wandb", place=place), ENTRY)
    assert problem.startswith("wandb is not installed for ")
    assert problem.endswith(": pip install wandb")
