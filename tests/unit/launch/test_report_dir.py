"""The run folder is made before the start."""

from __future__ import annotations

from datetime import datetime

import pytest

from ddpdoctor.launch.report_dir import make_default_dir, make_report_dir
from ddpdoctor.model.errors import UserError

NOW = datetime(2026, 3, 4, 5, 6, 7)  # noqa: DTZ001  a name, not a moment


def mode(path):
    return path.stat().st_mode & 0o777


def test_the_default_folder_is_named_by_time_and_script_and_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [make_default_dir("a b/my train.py", is_module=False, now=NOW) for _ in range(3)]
    names = [path.name for path in made]
    assert names == [f"20260304-050607-my_train{end}" for end in ("", "-2", "-3")]
    assert all(mode(path) == 0o700 for path in made)


def test_a_module_gives_its_last_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_default_dir("pkg.sub.train", is_module=True, now=NOW).name == "20260304-050607-train"


def test_a_new_folder_is_private_and_left_empty(tmp_path):
    path = make_report_dir(tmp_path / "a" / "b")
    assert mode(path) == 0o700
    assert list(path.iterdir()) == []


def test_an_empty_folder_becomes_private(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    assert mode(make_report_dir(tmp_path / "run")) == 0o700


def test_a_folder_with_other_files_may_be_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert make_report_dir(tmp_path) == tmp_path
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("mark", ["report.json", "run.json"])
def test_another_run_is_never_overwritten(tmp_path, mark):
    (tmp_path / mark).write_text("{}")
    with pytest.raises(UserError, match="already holds another run"):
        make_report_dir(tmp_path)


@pytest.mark.parametrize("below", ["file", "file/under"])
def test_what_is_no_folder_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is not writable"):
        make_report_dir(tmp_path / below)
