"""What is imported where: start-up stays cheap, and each heavy package has its place. A class name means one thing."""

import ast
import functools
import graphlib
import importlib.util
import json
import lzma
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import ddpdoctor

# What is imported where: start-up stays cheap, and each heavy package has its place.


PACKAGE = Path(__file__).parents[2] / "ddpdoctor"
HEAVY = ("torch", "rich", "psutil", "pynvml", "numpy", "matplotlib")
WITH_TORCH = {PACKAGE / "recorder" / "fingerprint.py"}
"""All they do is done with torch; who needs them loads them in a function, once the script has loaded torch."""
FILES = sorted(PACKAGE.rglob("*.py"))

HELP = """
import contextlib, io, json, sys
sys.argv = ["ddpdoctor", *sys.argv[1:]]
from ddpdoctor.cli.app import main
with contextlib.redirect_stdout(io.StringIO()):
    try:
        status = main()
    except SystemExit as end:
        status = end.code
print(json.dumps([status, sorted(sys.modules)]))
"""


def run_python(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    # A start-up hook on PYTHONPATH, such as a coverage tool's, is no import of ours.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200, env=environment).stdout


def heavy_ones(modules):
    return {name.partition(".")[0] for name in modules} & set(HEAVY)


def test_importing_the_package_imports_nothing_more():
    # The modules that site brings, by the .pth files of what else is installed, are taken out.
    code = "import json, sys; old = set(sys.modules); import ddpdoctor; print(json.dumps([*set(sys.modules) - old]))"
    assert json.loads(run_python(code)) == ["ddpdoctor"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",), ("--version",), ("wrap", "--help"), ("explain", "--list"), ("check-env", "--list"),
        ("allreduce-bench", "--help"), ("check-data", "--help"), ("check-checkpoint", "--help"),
        ("check-consistency", "--help"), ("check-rendezvous", "--help"), ("demo", "--list"), ("report", "--help"),
        ("explain", "DD601"), ("check-data", "--samples", "455", "--world-size", "2", "--batch-size", "8"),
        ("report", "attach.json"),
    ],
)  # fmt: skip
def test_what_needs_no_job_loads_nothing_heavy_and_help_no_verb(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = lzma.decompress((PACKAGE.parent / "tests" / "data" / "pages" / "attach.json.xz").read_bytes())
    (tmp_path / "attach.json").write_bytes(saved)
    status, modules = json.loads(run_python(HELP, *arguments))
    assert status in (0, None)
    draws = arguments[-1] not in {"--help", "--version", "--list"}
    assert not heavy_ones(modules) - ({"rich"} if draws else set())
    verbs = ("pydantic", "ddpdoctor.cli.check_", "ddpdoctor.cli.wrap", "ddpdoctor.launch")
    assert arguments != ("--help",) or not [name for name in modules if name.startswith(verbs)]


@functools.cache
def parse(path):
    return ast.parse(path.read_text())


def all_imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def packages(names):
    return {name.partition(".")[0] for name in names}


def imported_beside(tree):
    """Return the names of modules of ours that are loaded together with a file of the recorder."""
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    return {name for node in found for name in ((node.module or "").rpartition(".")[2], *(a.name for a in node.names))}


def test_what_needs_torch_is_loaded_in_functions():
    names = {path.stem for path in WITH_TORCH}
    others = [path for path in (PACKAGE / "recorder").rglob("*.py") if path not in WITH_TORCH]
    assert others
    assert not [path.name for path in others if imported_beside(parse(path)) & names]


def test_pynvml_is_imported_in_one_file():
    users = [path for path in FILES if "pynvml" in packages(all_imports(parse(path)))]
    assert len(users) <= 1


def test_recorder_needs_the_standard_library_only():
    """And torch, at which the hooks look when the script has loaded it: ruff holds where that is imported."""
    # The name under which the start-up hook loads the recorder by its path, and the module that it stands in front of.
    known = sys.stdlib_module_names | {"_ddpdoctor_recorder", "sitecustomize"}
    files = (PACKAGE / "recorder").rglob("*.py")
    assert set().union(*(packages(all_imports(parse(path))) for path in files)) - known == {"torch"}


def imports_by_module():
    """Return which modules of ours each module imports: at its start, in functions and for type checkers alike."""
    names = {_module_name(path): path for path in FILES}
    return {name: _ours_in(name, path, names.keys()) - {name} for name, path in names.items()}


def _module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _ours_in(name, path, known):
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {one if (one := f"{base}.{alias.name}") in known else base for alias in node.names}
    return found & set(known)


def circle(imports):
    """Return the modules of one circle, each before the one that it is imported by; none where there is no circle."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_finds_a_circle():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()})) == {"b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(imports_by_module()) == []


# One class name means one thing in all of ddpdoctor.


ONE_A_VERB = {"Options"}


def test_no_two_classes_have_one_name():
    names = Counter(
        node.name
        for path in Path(ddpdoctor.__file__).parent.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(names) > 300
    assert {name for name, count in names.items() if count > 1} == ONE_A_VERB


def given_twice(source):
    """Return the names that a module gives to two constants, classes or functions, of which one would be lost."""
    names: Counter[str] = Counter()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] += 1
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
    return {name for name, count in names.items() if count > 1}


def test_no_module_gives_a_name_twice():
    """Joined modules may each have had a LIMIT_S, and each function reads the last one."""
    assert given_twice("A, B = 1, 2\ndef f(): ...\nB: int = 3\nclass f: ...\nC: int\nC = 4") == {"B", "f"}
    assert {path.name: names for path in FILES if (names := given_twice(path.read_text()))} == {}
