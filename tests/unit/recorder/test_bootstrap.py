"""The start-up hook: off without its variable, harmless when it fails, chained to a sitecustomize that stood there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddpdoctor.recorder

BOOTSTRAP = Path(ddpdoctor.recorder.__file__).parent / "bootstrap"


def python(code: str, *paths: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DDPDOCTOR_")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (BOOTSTRAP, *paths))), **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def folder(tmp_path: Path) -> Path:
    for name in ("rings", "evidence"):
        (tmp_path / name).mkdir()
    (tmp_path / "control").write_bytes(bytes(4096))
    return tmp_path


SHOW = "import sys; print('_ddpdoctor_recorder' in sys.modules, any('bootstrap' in p for p in sys.path))"


def test_without_the_variable_nothing_is_loaded() -> None:
    assert python(SHOW).stdout == "False False\n"


def test_with_it_the_recorder_is_there_and_its_folder_is_not_on_the_path(tmp_path: Path) -> None:
    assert python(SHOW, DDPDOCTOR_RUN=str(folder(tmp_path))).stdout == "True False\n"


def test_a_process_that_is_no_rank_gets_no_ring(tmp_path: Path) -> None:
    python("pass", DDPDOCTOR_RUN=str(folder(tmp_path)))
    assert list((tmp_path / "rings").iterdir()) == []


def test_a_rank_gets_one(tmp_path: Path) -> None:
    run = {"DDPDOCTOR_RUN": str(folder(tmp_path)), "DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "0"}
    done = python(
        "import sys; print(sorted(m for m in ('torch', 'asyncio', 'typing_extensions') if m in sys.modules))", **run
    )
    assert done.stdout == "[]\n"
    assert len(list((tmp_path / "rings").iterdir())) == 1


@pytest.mark.parametrize("is_rank", [False, True])
def test_what_costs_time_to_import_is_not_imported_for_us(tmp_path: Path, *, is_rank: bool) -> None:
    code = "import sys; print(*sorted(sys.modules), sep=chr(10))"
    run = {"DDPDOCTOR_RUN": str(folder(tmp_path))}
    rank = {"DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "0"} if is_rank else {}
    added = {*python(code, **run, **rank).stdout.split()} - {*python(code).stdout.split()}
    slow = {"collections", "enum", "functools", "inspect", "json", "re", "signal", "sysconfig", "threading", "typing"}
    assert not added & slow
    parts = {name for name in added if name.startswith("_ddpdoctor_recorder.")}
    assert is_rank or {name.rpartition(".")[2] for name in parts} <= {"imports", "settings", "start", "state"}


def test_a_module_and_a_package_that_stood_there_are_loaded_with_and_without_us(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "sitecustomize.py").write_text("print('module')")
    (tmp_path / "two" / "sitecustomize").mkdir(parents=True)
    (tmp_path / "two" / "sitecustomize" / "__init__.py").write_text("print('package')")
    run = str(folder(tmp_path))
    for name, text in (("one", "module\n"), ("two", "package\n")):
        assert python("pass", tmp_path / name).stdout == text
        assert python("pass", tmp_path / name, DDPDOCTOR_RUN=run).stdout == text


def test_a_folder_that_is_gone_costs_the_record_and_nothing_else(tmp_path: Path) -> None:
    run = {"DDPDOCTOR_RUN": str(tmp_path / "gone"), "DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "0"}
    done = python("print('trained')", **run)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


def test_a_full_disk_leaves_word_and_training_goes_on(tmp_path: Path) -> None:
    (folder(tmp_path) / "rings").rmdir()
    (tmp_path / "rings").write_text("not a folder")
    run = {"DDPDOCTOR_RUN": str(tmp_path), "DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "3"}
    done = python("print('trained')", **run)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    (word,) = tmp_path.glob("lost-*")
    assert word.read_text().startswith("3\nno ring could be made")


def test_an_uncaught_exception_reads_as_without_us(tmp_path: Path) -> None:
    code = "def f():\n raise ValueError('x') from KeyError('y')\nf()"
    plain = python(code)
    run = {"DDPDOCTOR_RUN": str(folder(tmp_path)), "DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "0"}
    recorded = python(code, **run)
    assert (recorded.returncode, recorded.stderr) == (plain.returncode, plain.stderr)
    assert "ValueError" in plain.stderr
