"""The look at a script before the start."""

import zipfile

import pytest

from ddpdoctor.collect.gpu.nvml import GpuCount
from ddpdoctor.launch.command.script import (
    check_command,
    check_script,
    choose_nproc,
    choose_ranks,
    locate_module,
    starts_ranks,
)
from ddpdoctor.model.errors import UserError


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
