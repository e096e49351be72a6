"""What is imported where: start-up stays cheap, and each heavy package has its place. A class name means one thing."""

import ast
import functools
import graphlib
import importlib.util
import json
import lzma
import subprocess
import sys
from collections import Counter
from pathlib import Path

# What is imported where: start-up stays cheap, and each heavy package has its place.


PACKAGE = Path(__file__).parents[2] / "ddpdoctor"
HEAVY = {"torch", "rich", "psutil", "pynvml", "numpy", "matplotlib"}
WITH_TORCH = {PACKAGE / "recorder" / "fingerprint.py"}
"""All they do is done with torch; who needs them loads them in a function, once the script has loaded torch."""
FILES = sorted(PACKAGE.rglob("*.py"))

LOADED = """
import contextlib, io, json, sys
before = set(sys.modules)
import ddpdoctor
found = [[0, sorted(set(sys.modules) - before)]]
from ddpdoctor.cli.app import main
for line in sys.argv[1:]:
    sys.argv = ["ddpdoctor", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main()
        except SystemExit as end:
            status = end.code
    found.append([status, sorted(sys.modules)])
print(json.dumps(found))
"""
"""Prints what the package loads, beside the modules that site brings, and what is loaded after each command line."""
LIST = (
    "--help", "--version", "wrap --help", "explain --list", "check-env --list", "allreduce-bench --help",
    "check-data --help", "check-checkpoint --help", "check-consistency --help", "check-rendezvous --help",
    "demo --list", "report --help",
)  # fmt: skip
DRAW = ("explain DD601", "check-data --samples 455 --world-size 2 --batch-size 8", "report attach.json")


def test_what_needs_no_job_loads_nothing_heavy_and_help_no_verb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = lzma.decompress((PACKAGE.parent / "tests" / "data" / "pages" / "attach.json.xz").read_bytes())
    (tmp_path / "attach.json").write_bytes(saved)
    # A start-up hook on PYTHONPATH, such as a coverage tool's, is no import of ours.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [sys.executable, "-c", LOADED, *LIST, *DRAW]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    of_package, of_help, *others = json.loads(done.stdout)
    assert of_package[1] == ["ddpdoctor"]
    verbs = ("pydantic", "ddpdoctor.cli.check_", "ddpdoctor.cli.wrap", "ddpdoctor.launch")
    assert [name for name in of_help[1] if name.startswith(verbs)] == []
    for line, (status, modules) in zip((*LIST, *DRAW), (of_help, *others), strict=True):
        heavy = {name.partition(".")[0] for name in modules} & HEAVY
        assert (status in {0, None}, heavy - ({"rich"} if line in DRAW else set())) == (True, set()), line


@functools.cache
def parse(path):
    """Return what a file defines, and all its imports: at its start, in functions and for type checkers alike."""
    tree = ast.parse(path.read_text())
    return tree.body, [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def packages_of(path):
    """Return the packages that a file imports, ours left out."""
    imports = [node for node in parse(path)[1] if isinstance(node, ast.Import) or (node.level == 0 and node.module)]
    named = [[one.name for one in node.names] if isinstance(node, ast.Import) else [node.module] for node in imports]
    return {name.partition(".")[0] for names in named for name in names}


def test_heavy_packages_have_their_place():
    """The recorder looks at torch when the script has loaded it: ruff holds where that is imported."""
    recorder = sorted((PACKAGE / "recorder").rglob("*.py"))
    beside = {
        (path, name)
        for path in recorder
        for node in parse(path)[0]
        if isinstance(node, ast.ImportFrom) and node.level
        for name in ((node.module or "").rpartition(".")[2], *(one.name for one in node.names))
    }
    assert len(beside) > 50
    needs_torch = {path.stem for path in WITH_TORCH}
    assert [path.name for path, name in beside if path not in WITH_TORCH and name in needs_torch] == []
    assert len([path for path in FILES if "pynvml" in packages_of(path)]) <= 1
    # The name under which the start-up hook loads the recorder by its path, and the module that it stands in front of.
    known = sys.stdlib_module_names | {"_ddpdoctor_recorder", "sitecustomize"}
    assert set().union(*map(packages_of, recorder)) - known == {"torch"}


def _module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _ours_in(name, path, known):
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in parse(path)[1]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
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


def test_no_modules_import_each_other_in_a_circle():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()})) == {"b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    names = {_module_name(path): path for path in FILES}
    assert circle({name: _ours_in(name, path, names.keys()) - {name} for name, path in names.items()}) == []


# One class name means one thing in all of ddpdoctor.


ONE_A_VERB = {"Options"}


def given_twice(body):
    """Return the names that a module gives to two constants, classes or functions, of which one would be lost."""
    names: Counter[str] = Counter()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] += 1
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
    return {name for name, count in names.items() if count > 1}


def test_no_two_classes_have_one_name_and_no_module_gives_one_twice():
    """Joined modules may each have had a LIMIT_S, and each function reads the last one."""
    classes = [node.name for path in FILES for node in parse(path)[0] if isinstance(node, ast.ClassDef)]
    names = Counter(name for name in classes if not name.startswith("_"))
    assert len(names) > 300
    assert {name for name, count in names.items() if count > 1} == ONE_A_VERB
    text = "A, B = 1, 2\ndef f(): ...\nB: int = 3\nclass f: ...\nC: int\nC = 4"
    assert given_twice(ast.parse(text).body) == {"B", "f"}
    assert {path.name: names for path in FILES if (names := given_twice(parse(path)[0]))} == {}
