"""What is made and looked at before a job starts."""

import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from ddpdoctor.collect.gpus import GpuCount
from ddpdoctor.launch.command_line import (
    TorchrunSettings,
    check_command,
    check_script,
    choose_nproc,
    choose_ranks,
    locate_module,
    starts_ranks,
)
from ddpdoctor.launch.run_folder import launch_shape, make_default_dir, make_report_dir
from ddpdoctor.launch.seen import why_unrecorded
from ddpdoctor.launch.stopping import Guardian
from ddpdoctor.model.errors import UserError
from tests.scenarios.running import wait_for

# The run folder is made before the start.


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


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        (("--nproc-per-node=3",), (3, 1, None)),
        (("--nproc_per_node", "4", "--nnodes", "2", "--node_rank", "1"), (4, 2, 1)),
        (("--nproc-per-node=gpu", "--nnodes=1:4"), (None, 1, None)),
        (("--nproc-per-node", "²", "--nnodes=²", "--node-rank", "x"), (None, None, None)),
        (("--tee=3", "--rdzv-id", "--nnodes", "--nnodes", "2"), (None, 2, None)),
        ((), (None, 1, None)),
    ],
)
def test_the_shape_of_a_job_is_read_from_torchruns_options(
    arguments: tuple[str, ...], shape: tuple[int | None, ...]
) -> None:
    found = launch_shape(TorchrunSettings(arguments, {}))
    assert (found["nproc"], found["nnodes"], found["node_rank"]) == shape


# The look at a script before the start.


def test_source_of_a_good_script_is_returned(tmp_path):
    script = tmp_path / "train.py"
    script.write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    assert check_script(str(script)) == script.read_bytes()


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"gone\.py was not found") as error:
        check_script(str(tmp_path / "gone.py"))
    assert error.value.status == 2


def test_a_directory_is_no_script_unless_python_could_run_it(tmp_path):
    with pytest.raises(UserError, match="is a directory"):
        check_script(str(tmp_path))
    (tmp_path / "__main__.py").write_text("x = 1\n")
    assert check_script(str(tmp_path)) == b"x = 1\n"


@pytest.mark.parametrize(
    ("source", "line"),
    [("def f(:\n", 1), ("x = 1\nif x\n    y = 2\n", 2), ("x = 1\n\nreturn 3\n", 3), ("if 1:\nx = 1\n", 2)],
)
def test_a_syntax_error_names_file_and_line(tmp_path, source, line):
    script = tmp_path / "bad.py"
    script.write_text(source)
    with pytest.raises(UserError) as error:
        check_script(str(script))
    assert f"{script}:{line}: " in error.value.message


def test_a_file_of_null_bytes_is_an_error_of_the_user(tmp_path):
    script = tmp_path / "nul.py"
    script.write_bytes(b"x = 1\0\n")
    with pytest.raises(UserError):
        check_script(str(script))


def test_a_zip_application_has_no_source_to_check(tmp_path):
    archive = tmp_path / "app.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "x = 1\n")
    assert check_script(str(archive)) is None


def test_checking_does_not_run_the_script_nor_warn(tmp_path, recwarn):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('\\d')\n")
    assert starts_ranks(check_script(str(script))) is None
    assert not recwarn.list


def test_modules_are_found_without_importing(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "train.py").write_text("")
    assert locate_module("package.train", ["/nowhere", str(tmp_path)]) == package / "train.py"
    assert locate_module("package", [str(tmp_path)]) is None
    (package / "__main__.py").write_text("")
    assert locate_module("package", [str(tmp_path)]) == package / "__main__.py"


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(f)", "mp.spawn"),
        ("import torch\ntorch.multiprocessing.spawn(f)", "torch.multiprocessing.spawn"),
        ("import torch.multiprocessing\ntorch.multiprocessing.spawn(f)", "torch.multiprocessing.spawn"),
        ("from torch import multiprocessing as tmp\ndef g():\n  tmp.start_processes(f)", "tmp.start_processes"),
        ("from torch.multiprocessing import spawn\nspawn(f)", "spawn"),
        ("from torch.multiprocessing import spawn as go\ngo(f)", "go"),
        ("from accelerate import notebook_launcher\nnotebook_launcher(f)", "notebook_launcher"),
        ("import accelerate\naccelerate.notebook_launcher(f)", "accelerate.notebook_launcher"),
        ("import torch.multiprocessing as mp\nmp.set_start_method('spawn')", None),
        ("import torch.multiprocessing as mp\nf = mp.spawn", None),
        ("import multiprocessing as mp\nmp.spawn.freeze_support()", None),
        ("class A:\n  def spawn(self): pass\nA().spawn()", None),
        ("from game import spawn\nspawn()", None),
        ("# mp.spawn(f)\ns = 'mp.spawn(f)'", None),
        ("from .launch import spawn\nspawn()", None),
    ],
)
def test_scripts_that_start_ranks_themselves(source, call):
    assert starts_ranks(source.encode()) == call


@pytest.mark.parametrize(
    ("source", "gpus", "ranks", "said"),
    [
        (b"x = 1", GpuCount(), 2, "no GPU was found"),
        (b"x = 1", GpuCount(count=1), 1, "the one GPU"),
        (b"x = 1", GpuCount(count=8), 8, "8 ranks, one per GPU"),
        (None, GpuCount(), 2, "no GPU was found"),
        (b"x = 1", GpuCount(unknown="NVML did not answer"), 2, "GPUs are unknown: NVML did not answer"),
        (b"import torch.multiprocessing as mp\nmp.spawn(f)", GpuCount(count=8), 1, "mp.spawn"),
    ],
)
def test_the_number_of_ranks_and_the_sentence_about_it(source, gpus, ranks, said):
    chosen, note = choose_nproc(source=source, gpus=gpus)
    assert chosen == ranks
    assert said in note
    assert "--nproc-per-node" in note


@pytest.mark.parametrize(
    ("args", "env"),
    [
        (("--nproc-per-node", "3"), {}),
        (("--nnodes", "2", "--nproc_per_node=gpu"), {}),
        ((), {"PET_NPROC_PER_NODE": "2"}),
    ],
)
def test_what_the_user_chose_stays(args, env):
    assert choose_ranks(args, b"", env) == ((), None)


@pytest.mark.parametrize(
    ("name", "mode", "advice"),
    [("train.py", 0o644, "ddpdoctor wrap -- python"), ("run.sh", 0o644, "ddpdoctor wrap -- bash"), ("gone", None, "")],
)
def test_a_command_that_cannot_run_is_an_error_that_says_what_to_type(tmp_path, name, mode, advice):
    file = tmp_path / name
    if mode is not None:
        file.write_text("#!/bin/sh")
        file.chmod(mode)
    with pytest.raises(UserError) as error:
        check_command(str(file), "/usr/bin:/bin")
    assert error.value.status == 2
    assert advice in error.value.help


def test_a_command_is_looked_for_as_a_shell_does(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("#!/usr/bin/env python")
    script.chmod(0o755)
    check_command(str(script), "")
    check_command("sh", "/usr/bin:/bin")
    with pytest.raises(UserError, match="not found"):
        check_command("train.py", str(tmp_path / "bin"))


# Which Pythons keep the recorder out, and why.


LOADED = {"DDPDOCTOR_RUN": "/run", "PYTHONPATH": "/x/ddpdoctor/recorder/bootstrap:/mine"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("python train.py", ""),
        ("python -u -X dev train.py -I", ""),
        ("python -W ignore -m pkg -S", ""),
        ("python -WI train.py", ""),
        ("python -c I", ""),
        ("python", ""),
        ("python -I train.py", "-I"),
        ("python -uE -m pkg", "-E"),
        ("python -X dev -S train.py", "-S"),
    ],
)
def test_options_that_switch_start_up_hooks_off_are_named(line, reason):
    why = why_unrecorded(line.split(), LOADED)
    assert (reason in why) if reason else not why


@pytest.mark.parametrize("lacks", ["DDPDOCTOR_RUN", "PYTHONPATH"])
def test_an_environment_of_its_own_is_named(lacks):
    environment = {name: value for name, value in LOADED.items() if name != lacks}
    assert lacks in why_unrecorded(["python", "train.py"], environment)


# A watcher that is killed leaves nobody of its job behind, at whatever moment of the start that happens. The
# processes that die or are left hold a pipe open: its end says that all of them have gone, the guardian too.


SLEEPS = "import os, time; os.write({fd}, b'here '); time.sleep(600)"
LEAVES_A_CHILD = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeps!r}], start_new_session=True, "
    "close_fds=False)"
)
KEEPS_STARTING = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "while True: subprocess.Popen([sys.executable, '-c', {sleeps!r}], start_new_session=True, close_fds=False); "
    "time.sleep(0.1)"
)
FORGETS = "import os, sys; os.execve(sys.executable, [sys.executable, '-c', {sleeps!r}], {{}})"


def kill_watcher() -> None:
    """Kill the parent, and return once it is gone."""
    watcher = os.getppid()
    os.kill(watcher, signal.SIGKILL)
    assert wait_for(lambda: os.getppid() != watcher)


def before_it_is_named(guardian: Guardian) -> None:
    kill_watcher()
    guardian.protect_self()


def before_it_is_the_launcher(guardian: Guardian) -> None:
    guardian.protect_self()
    kill_watcher()


def once_the_launcher_runs(guardian: Guardian) -> None:
    guardian.protect_self()


def once_the_launcher_has_ended(guardian: Guardian) -> None:
    guardian.protect_self()


def watch(folder: Path, fd: int, code: str, in_child: Callable[[Guardian], None]) -> None:
    """Be a watcher: start a guardian and a launcher, and be killed."""
    mark = {"DDPDOCTOR_RUN": str(folder), "DDPDOCTOR_WATCHER": str(os.getpid())}
    guardian = Guardian(folder, mark, lambda: os.write(fd, b"orphaned "))
    launcher = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env={**os.environ, **mark}, pass_fds=(fd,),
        preexec_fn=lambda: in_child(guardian),  # noqa: PLW1509 - no threads here
    )  # fmt: skip
    if in_child is once_the_launcher_has_ended:
        launcher.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def all_that_is_said(folder: Path, code: str, in_child: Callable[[Guardian], None]) -> bytes:
    """Return what the job wrote until its last process had ended."""
    reader, writer = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(reader)
        os.set_inheritable(writer, True)  # noqa: FBT003 - positional only
        try:
            watch(folder, writer, code.format(fd=writer, sleeps=SLEEPS.format(fd=writer)), in_child)
        finally:
            os._exit(1)
    os.close(writer)
    said = b""
    with os.fdopen(reader, "rb") as file:
        while chunk := file.read():
            said += chunk
    assert os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1]) == -signal.SIGKILL
    return said


@pytest.mark.parametrize("in_child", [before_it_is_named, before_it_is_the_launcher, once_the_launcher_runs])
@pytest.mark.parametrize("code", [SLEEPS, LEAVES_A_CHILD, KEEPS_STARTING, FORGETS])
def test_a_killed_watcher_leaves_nobody(code: str, in_child: Callable[[Guardian], None], tmp_path: Path) -> None:
    assert all_that_is_said(tmp_path, code, in_child).endswith(b"orphaned ")


def test_a_process_that_the_launcher_has_left_behind_is_found(tmp_path: Path) -> None:
    assert all_that_is_said(tmp_path, LEAVES_A_CHILD, once_the_launcher_has_ended).endswith(b"orphaned ")


def test_a_watcher_killed_before_it_starts_anything(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        Guardian(tmp_path, {"DDPDOCTOR_RUN": str(tmp_path)}, lambda: os.write(writer, b"orphaned"))
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == b""
    os.waitpid(watcher, 0)


def test_a_guardian_that_is_dismissed_stops_nobody(tmp_path: Path) -> None:
    guardian = Guardian(tmp_path, {"DDPDOCTOR_RUN": str(tmp_path)}, lambda: None)
    with subprocess.Popen(["sleep", "600"], preexec_fn=guardian.protect_self) as launcher:  # noqa: PLW1509
        guardian.dismiss()
        assert launcher.poll() is None
        launcher.kill()
