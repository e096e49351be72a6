"""What is made and looked at before a job starts."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from datetime import datetime
from pathlib import Path

import pytest

from ddpdoctor.collect.gpus import GpuCount
from ddpdoctor.launch.command_line import (
    SplitCommand,
    check_command,
    check_script,
    choose_nproc,
    choose_ranks,
    locate_module,
    starts_ranks,
)
from ddpdoctor.launch.placement import Placement, WrapOptions
from ddpdoctor.launch.run_folder import make_default_dir, make_report_dir, write_run_file
from ddpdoctor.launch.seen import why_unrecorded
from ddpdoctor.launch.stopping import Guardian
from ddpdoctor.model.errors import UserError
from tests.golden import words
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
    assert make_default_dir("pkg.sub.train", is_module=True, now=NOW).name == "20260304-050607-train"


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


@pytest.mark.parametrize("names", [None, [], ["latest", "notes.txt"]])
def test_a_folder_that_is_new_or_holds_only_what_is_the_users_own_may_be_used(tmp_path, names):
    """It becomes private, and no part of a repository around it, if it is empty."""
    folder = tmp_path / "a" / "b"
    if names is not None:
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    if names:
        write(folder / "notes.txt")
        (folder / "latest").symlink_to("nowhere")
    assert make_report_dir(folder) == folder
    assert sorted(path.name for path in folder.iterdir()) == (names or [".gitignore"])
    assert names or (folder / ".gitignore").read_text() == "*\n"
    assert mode(folder) == (0o755 if names else 0o700)


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def give_away(path):
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, 54321, 54321)


def all_below(folder):
    return sorted((str(path), path.is_symlink(), path.is_file() and path.read_text()) for path in folder.rglob("*"))


def refused_folder(take):
    """Have something take a run folder, or None be below a file; return why it is refused, all left as it is."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "file/run" if take == "None" else "run")
        Path(folder, "real").mkdir()
        write(Path(folder, "file"), "mine")
        eval(take, globals(), {"run": run})
        before = all_below(Path(folder))
        with pytest.raises(UserError) as refused:
            make_report_dir(run)
        assert all_below(Path(folder)) == before
        return refused.value.message.replace(folder, "FOLDER")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("take", [
    "give_away(run)", 'give_away(run / "rings")', '(write(run / "control"), os.chown(run / "control", 54321, 54321))',
])  # fmt: skip
def test_what_another_user_has_is_refused(take):
    assert "belongs to another user (uid 54321)" in refused_folder(take)


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


# The look at a script before the start.


def script_of(source):
    """Look at a script before the start; return where it cannot run: no two Pythons say in the same words why."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_bytes(source)
        try:
            return check_script(str(Path(folder, "train.py")))
        except UserError as error:
            return f"{error.message.replace(folder, 'FOLDER').partition(': ')[0]}, status {error.status}"


def commanded(row):
    """Look at a command before the start; return what is refused, without its folder."""
    name, text = row
    with tempfile.TemporaryDirectory() as folder:
        if text:
            Path(folder, name).write_text(text)
            Path(folder, name).chmod(0o644)
        try:
            return check_command(str(Path(folder, name)), "/usr/bin:/bin")
        except UserError as error:
            return f"{error.message} {error.help} status {error.status}".replace(folder, "FOLDER")


def test_of_what_python_can_run_the_source_is_returned_without_running_it(tmp_path, recwarn):
    """A zip application has no source to check."""
    with pytest.raises(UserError, match="is a directory"):
        check_script(str(tmp_path))
    script = tmp_path / "train.py"
    for source, said in ((None, "was not found"), (b"x = 1\0\n", r"train\.py")):
        if source is not None:
            script.write_bytes(source)
        with pytest.raises(UserError, match=said):
            check_script(str(script))
    script = tmp_path / "__main__.py"
    for source in (b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", b"raise SystemExit('\\d')\n"):
        script.write_bytes(source)
        assert check_script(str(script)) == check_script(str(tmp_path)) == source
    assert starts_ranks(source) is None
    assert not recwarn.list
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as file:
        file.writestr("__main__.py", "x = 1\n")
    assert check_script(str(tmp_path / "app.pyz")) is None


def test_modules_are_found_without_importing(tmp_path):
    write(tmp_path / "package" / "train.py")
    assert locate_module("package.train", ["/nowhere", str(tmp_path)]) == tmp_path / "package" / "train.py"
    assert locate_module("package", [str(tmp_path)]) is None
    write(tmp_path / "package" / "__main__.py")
    assert locate_module("package", [str(tmp_path)]) == tmp_path / "package" / "__main__.py"


def test_a_command_is_looked_for_as_a_shell_does(tmp_path):
    script = tmp_path / "train.py"
    write(script, "#!/usr/bin/env python")
    script.chmod(0o755)
    check_command(str(script), "")
    check_command("sh", "/usr/bin:/bin")
    with pytest.raises(UserError, match="not found"):
        check_command("train.py", str(tmp_path / "bin"))


# What is said of options, of sources, and of Pythons that keep the recorder out.


LOADED = {"DDPDOCTOR_RUN": "/run", "PYTHONPATH": "/x/ddpdoctor/recorder/bootstrap:/mine"}


def number_of_ranks(row):
    gpus, source = row
    return choose_nproc(source=source, gpus=GpuCount(unknown=gpus) if isinstance(gpus, str) else GpuCount(count=gpus))


def shape_of(line):
    """Return how many ranks a run folder says were asked for."""
    with tempfile.TemporaryDirectory() as folder:
        options = WrapOptions(
            split=SplitCommand(script="train.py", torchrun=tuple(line.split())), hang_timeout_s=1.0, on_hang="auto",
            report_dir=Path(folder), report_file=Path(folder, "report.json"), placement=Placement(), command=(),
        )  # fmt: skip
        write_run_file(Path(folder), options, "", 0)
        run = json.loads(Path(folder, "run.json").read_text())
    return {name: run[name] for name in ("nproc", "nnodes", "node_rank")}


def chosen_ranks(row):
    arguments, _, env = row.partition(" | ")
    return choose_ranks(tuple(arguments.split()), b"", dict([env.split("=")] if env else []))


test_words = words(
    __name__,
    check_script=script_of,
    check_command=commanded,
    make_report_dir=refused_folder,
    launch_shape=shape_of,
    starts_ranks=lambda source: starts_ranks(source.encode()),
    number_of_ranks=number_of_ranks,
    choose_ranks=chosen_ranks,
    why_unrecorded=lambda line: why_unrecorded(line.split(), LOADED),
)


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


def watch(folder: Path, fd: int, code: str, moment: str) -> None:
    """Be a watcher: start a guardian and a launcher, and be killed at some moment."""
    mark = {"DDPDOCTOR_RUN": str(folder), "DDPDOCTOR_WATCHER": str(os.getpid())}
    guardian = Guardian(folder, mark, lambda: os.write(fd, b"orphaned "))

    def in_child() -> None:
        if moment == "before it is named":
            kill_watcher()
        guardian.protect_self()
        if moment == "before it is the launcher":
            kill_watcher()

    launcher = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env={**os.environ, **mark}, pass_fds=(fd,),
        preexec_fn=in_child,  # noqa: PLW1509 - no threads here
    )  # fmt: skip
    if moment == "once the launcher has ended":
        launcher.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def all_that_is_said(folder: Path, code: str, moment: str) -> bytes:
    """Return what the job wrote until its last process had ended."""
    reader, writer = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(reader)
        os.set_inheritable(writer, True)  # noqa: FBT003 - positional only
        try:
            watch(folder, writer, code.format(fd=writer, sleeps=SLEEPS.format(fd=writer)), moment)
        finally:
            os._exit(1)
    os.close(writer)
    said = b""
    with os.fdopen(reader, "rb") as file:
        while chunk := file.read():
            said += chunk
    assert os.waitstatus_to_exitcode(os.waitpid(watcher, 0)[1]) == -signal.SIGKILL
    return said


@pytest.mark.parametrize(
    ("code", "moment"),
    [
        *((code, "once the launcher runs") for code in (SLEEPS, LEAVES_A_CHILD, KEEPS_STARTING, FORGETS)),
        (KEEPS_STARTING, "before it is named"), (KEEPS_STARTING, "before it is the launcher"),
        (LEAVES_A_CHILD, "once the launcher has ended"),
    ],
)  # fmt: skip
def test_a_killed_watcher_leaves_nobody(code: str, moment: str, tmp_path: Path) -> None:
    assert all_that_is_said(tmp_path, code, moment).endswith(b"orphaned ")


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
