"""The start-up hook is harmless, and the recorder loads into any Python from 3.8 on."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpdoctor.recorder
from ddpdoctor.recorder.storage import ring_reading

# The start-up hook: off without its variable, harmless when it fails, chained to a sitecustomize that stood there.


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


# The recorder loads by its path into any Python from 3.8 on, with nothing of ddpdoctor installed there.


RECORDER = Path(ddpdoctor.recorder.__file__).parent
FILES = sorted(RECORDER.rglob("*.py"))
MINORS = range(8, 15)
NEWER = {"annotationlib", "compression", "graphlib", "tomllib", "zoneinfo"}
"""Modules of the standard library that came after Python 3.8."""
BUILT_IN_GENERICS = {"dict", "frozenset", "list", "set", "tuple", "type"}
SCRIPT = """
import importlib, os, threading
import _ddpdoctor_recorder
home = _ddpdoctor_recorder.__path__[0]
for folder, _, files in os.walk(home):
    for file in [] if folder.endswith("bootstrap") else files:
        needs_torch = file.endswith(".py") and "import torch" in open(os.path.join(folder, file)).read().splitlines()
        if file.endswith(".py") and file != "__init__.py" and not needs_torch:
            name = os.path.relpath(os.path.join(folder, file), home)[:-3].replace(os.sep, ".")
            importlib.import_module("_ddpdoctor_recorder." + name)
thread = threading.Thread(target=print, args=("trained",))
thread.start(); thread.join()
if hasattr(os, "fork") and os.fork() == 0:
    os._exit(0)
def fail():
    raise ValueError("seeded")
fail()
"""
TRAINING = """
import importlib.util, torch, torch.distributed as dist
assert importlib.util.find_spec("ddpdoctor") is None
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
dist.all_reduce(torch.zeros(2, 3))
dist.destroy_process_group()
"""


def installed_python(minor: int) -> str | None:
    """Return a Python of that version that starts, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(map(str, pyenv.glob(f"versions/3.{minor}.*/bin/python")))
    for path in (shutil.which(f"python3.{minor}"), *installed):
        code = "import sys; print(sys.version_info[1])"
        if path and subprocess.run([path, "-c", code], capture_output=True, check=False).stdout == b"%d\n" % minor:
            return path
    return None


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is evaluated at run time: all but annotations and what only type checkers see."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or (name == "body" and _is_for_checkers(node)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from evaluated(child)


def _is_for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imported(tree: ast.AST) -> set[str]:
    """Return the names of all modules that a file imports, by their first part."""
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    parts = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    return {name.partition(".")[0] for name in plain | parts}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_python_3_8(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    generics = [
        node.lineno
        for node in evaluated(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in BUILT_IN_GENERICS
    ]
    assert generics == []
    assert not imported(tree) & NEWER
    annotated = any(getattr(node, "annotation", None) or getattr(node, "returns", None) for node in ast.walk(tree))
    first = next((node for node in tree.body if isinstance(node, ast.ImportFrom)), None)
    assert not annotated or (first is not None and first.module == "__future__")


def run_as_rank(
    executable: str | Path, code: str, folder: Path
) -> tuple[subprocess.CompletedProcess[str], list[ring_reading.RingContent]]:
    """Run code as a rank that is recorded; return how that went, and the rings of it and its children."""
    for name in ("rings", "evidence"):
        (folder / name).mkdir()
    (folder / "control").write_bytes(bytes(4096))
    env = {name: value for name, value in os.environ.items() if not name.startswith("DDPDOCTOR_")}
    env |= {"PYTHONPATH": str(RECORDER / "bootstrap"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
    env |= {"DDPDOCTOR_RUN": str(folder), "DDPDOCTOR_AGENT": str(os.getpid()), "RANK": "0"}
    done = subprocess.run([executable, "-c", code], capture_output=True, text=True, env=env, check=False, cwd=folder)
    assert list(folder.glob("lost-*")) == []
    return done, [ring_reading.read_ring_file(path) for path in (folder / "rings").iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="the recorder is for Linux")
@pytest.mark.parametrize("minor", MINORS)
def test_a_rank_of_another_python_is_recorded(minor: int, tmp_path: Path) -> None:
    other = installed_python(minor)
    if other is None:
        pytest.skip(f"no Python 3.{minor} is installed here")
    done, rings = run_as_rank(other, SCRIPT, tmp_path)
    assert (done.returncode, done.stdout) == (1, "trained\n"), done.stderr
    assert done.stderr.endswith("ValueError: seeded\n")
    (rank,) = [ring for ring in rings if any(note.get("k") == "raised" for note in ring.notes)]
    assert [note for note in rank.notes if note.get("k") == "defect"] == []
    assert rank.cells["main_ended_ns"]


def test_a_rank_in_an_environment_without_ddpdoctor_is_recorded(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    (packages,) = venv.glob("lib/python*/site-packages")
    # Path files of a folder that is itself named by one do not count, and ddpdoctor may be found by such a file.
    (packages / "torch.pth").write_text(str(Path(torch.origin).parents[1]))
    folder = tmp_path / "run"
    folder.mkdir()
    done, (ring,) = run_as_rank(venv / "bin" / "python", TRAINING, folder)
    assert done.returncode == 0, done.stderr
    assert [note for note in ring.notes if note.get("k") == "defect"] == []
    assert any(note.get("k") == "initialized" for note in ring.notes)
    assert "all_reduce" in [slot.op for slot in ring.slots]
