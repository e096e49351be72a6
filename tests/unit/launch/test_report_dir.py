"""The run folder is made before the start."""

import os
import tempfile
from datetime import datetime
from pathlib import Path

import pytest

from ddpdoctor.launch.folders.report_dir import make_default_dir, make_report_dir
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


def test_a_working_directory_without_a_place_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    made = make_default_dir("train.py", is_module=False, now=NOW)
    assert made.parent == tmp_path
    assert made.stat().st_mode & 0o777 == 0o700
    monkeypatch.chdir(tmp_path)
    Path("ddpdoctor-report").write_text("a file of somebody's")
    with pytest.raises(UserError, match="is not writable"):
        make_default_dir("train.py", is_module=False, now=NOW)


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


FILES = ["run.json", "report.json", "control", "agent.jsonl", "watch.json", "consistency.json", "nodes.json"]
FOLDERS = ["rings", "evidence", "prints", "nccl", "nodes", "gathered"]


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_where_a_run_writes_is_refused_and_not_followed(tmp_path, name, dangling):
    outside, folder = tmp_path / "outside", tmp_path / "run"
    folder.mkdir()
    if not dangling and name in FOLDERS:
        outside.mkdir()
    elif not dangling:
        outside.write_text("mine")
    (folder / name).symlink_to(outside)
    with pytest.raises(UserError, match=f"{name} in the report folder .* is a link to "):
        make_report_dir(folder)
    assert [path.name for path in folder.iterdir()] == [name]
    assert outside.exists() != dangling


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")
    with pytest.raises(UserError, match="is a link to real"):
        make_report_dir(tmp_path / "run")
    assert list((tmp_path / "real").iterdir()) == []


def test_links_of_other_names_are_the_users_own(tmp_path):
    (tmp_path / "latest").symlink_to("nowhere")
    assert make_report_dir(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["rings", "control"])
def test_what_is_of_another_kind_is_refused(tmp_path, name):
    if name == "rings":
        (tmp_path / name).write_text("")
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is not a f"):
        make_report_dir(tmp_path)


@pytest.mark.parametrize("name", ["", "rings", "control"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_what_belongs_to_another_user_is_refused(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    if name == "rings":
        (folder / name).mkdir()
    elif name:
        (folder / name).write_text("")
    os.chown(folder / name, 54321, 54321)
    with pytest.raises(UserError, match=r"belongs to another user \(uid 54321\)"):
        make_report_dir(folder)


def test_rings_without_a_run_are_another_runs(tmp_path):
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / "1-2.ring").write_text("")
    with pytest.raises(UserError, match="already holds another run"):
        make_report_dir(tmp_path)


@pytest.mark.parametrize("as_link", [False, True])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_the_default_folders_parent_may_not_be_planted_in_a_shared_working_directory(tmp_path, monkeypatch, as_link):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted").mkdir()
    if as_link:
        (tmp_path / "ddpdoctor-report").symlink_to("planted")
    else:
        (tmp_path / "planted").rename(tmp_path / "ddpdoctor-report")
    os.chown(tmp_path / "ddpdoctor-report", 54321, 54321, follow_symlinks=False)
    with pytest.raises(UserError, match="belongs to another user"):
        make_default_dir("train.py", is_module=False, now=NOW)
    os.chown(tmp_path, 54321, 54321)  # whose owner could replace all of it anyway
    make_default_dir("train.py", is_module=False, now=NOW)
