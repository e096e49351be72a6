"""Whether the fast tests see a broken line: python -m tests.bench.mutations [--seed N] [--count N] [--paths FOLDER ...]

Draws lines by a seed, and breaks one of them at a time in a copy of the tree: a condition negated, a statement
dropped, a number or a comparison off by one. First the tests run that are nearest to the module by imports, then, for
what these let pass, ``--wide``. A row is printed as soon as it is known, so that a run cut short is of use; ``--start``
goes on with the rows of the same draw. What cannot be imported does not count. Some that survive change nothing that
anyone could see: a person has to look at them.
"""

import argparse
import ast
import collections
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).parents[2]
TESTS = ("tests/rules", "tests/unit")
FAST = "not full and not standin and not alone"
NEAREST = 8
LIMIT_S = 400
WIDE_LIMIT_S = 1800  # what takes longer counts as found, so the wide part must not for being slow
NO_TESTS = 5  # what pytest says where all tests are deselected, which finds nothing
OFF_BY_ONE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Continue, ast.Break)


class Change(NamedTuple):
    """One place of a source, what was done there, and the source with it."""

    line: int
    what: str
    source: str


def changes(source: str) -> Iterator[Change]:
    """Return each way to break a source by one small change."""
    tree = ast.parse(source)
    skipped = {id(inner) for node in ast.walk(tree) for outer in _left_alone(node) for inner in ast.walk(outer)}
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    in_function = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for kind, place, text in _broken(node, droppable=id(node) in in_function):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            data = b"".join(lines)
            was = " ".join(data[start:end].decode().split())
            what = f"{kind}: {was}" if kind in {"dropped", "negated"} else f"{kind}: {was} -> {text}"
            yield Change(place.lineno, what, (data[:start] + f"({text})".encode() + data[end:]).decode())


def _left_alone(node: ast.AST) -> list[ast.AST]:
    """Return parts that a change says nothing about, or (f-strings before Python 3.12) that have no true place."""
    if isinstance(node, ast.JoinedStr):
        return [node]
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return [node]
    return [part for name in ("annotation", "returns") if (part := getattr(node, name, None)) is not None]


def _broken(node: ast.AST, *, droppable: bool) -> Iterator[tuple[str, ast.AST, str]]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "negated", node.test, f"not ({ast.unparse(node.test)})"
    elif isinstance(node, ast.comprehension):
        yield from (("negated", test, f"not ({ast.unparse(test)})") for test in node.ifs)
    elif isinstance(node, ast.BoolOp):
        yield from (("negated", part, f"not ({ast.unparse(part)})") for part in node.values)
    elif isinstance(node, ast.Compare):
        for number, op in enumerate(node.ops):
            if type(op) in OFF_BY_ONE:
                ops = [*node.ops[:number], OFF_BY_ONE[type(op)](), *node.ops[number + 1 :]]
                yield "off by one", node, ast.unparse(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", node, str(node.value + 1)
    elif droppable and isinstance(node, DROPPED) and not _is_text(node):
        yield "dropped", node, "None"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def draw(paths: list[str], seed: int) -> list[tuple[Path, Change]]:
    """Return one change for each line that can be broken, in an order that goes by the seed."""
    dice = random.Random(seed)
    by_line = collections.defaultdict(list)
    for folder in paths:
        for file in sorted(Path(folder).rglob("*.py")):
            for change in changes(file.read_text()):
                by_line[file, change.line].append(change)
    places = sorted(by_line)
    dice.shuffle(places)
    return [(file, dice.choice(by_line[file, line])) for file, line in places]


def module_of(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def importers(root: Path) -> dict[str, set[Path]]:
    """Return which files import a module, by its name."""
    found = collections.defaultdict(set)
    for file in [*root.glob("ddpdoctor/**/*.py"), *root.glob("tests/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            above = f"{node.module}" if isinstance(node, ast.ImportFrom) else ""
            for name in [above, *(f"{above}.{name}".strip(".") for name in names)] if names else []:
                found[name].add(file.relative_to(root))
    return found


def nearest(root: Path, file: Path, known: dict[str, set[Path]]) -> list[str]:
    """Return the tests of the folder that has a module's name, and some that reach it over the fewest imports.

    They are listed as they stand below the root: the tree may change meanwhile. The registry loads rules by their
    names, so that most tests of them import none.
    """
    seen, ring, tests = {file}, [file], []
    while ring and len(tests) < NEAREST:
        ring = sorted({user for one in ring for user in known[module_of(one)]} - seen)
        seen |= set(ring)
        tests += [one for one in ring if one.name.startswith("test_") and str(one).startswith(TESTS)]
    part = Path("tests", "unit" if file.parts[1] == "launch" else "", *file.parts[1:3])
    folder = root / (part if (root / part).is_dir() else part.parent)
    here = [str(test.relative_to(root)) for test in sorted(folder.glob("test_*.py"))]
    return list(dict.fromkeys([*here, *map(str, tests[:NEAREST])]))


class Copy:
    """A copy of the tree in which one file at a time is broken."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("ddpdoctor", "tests", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
            copy = shutil.copytree if (TREE / name).is_dir() else shutil.copy2
            copy(TREE / name, root / name)
        self.known = importers(root)

    def found_by(self, file: Path, change: Change, tests: list[str], limit_s: int = LIMIT_S) -> str:
        """Return which test fails with the change: '' for none, 'import' where the module cannot be loaded."""
        path = self.root / file
        good = path.read_text()
        try:
            self._write(path, change.source)
            if self._run("-c", f"import {module_of(file)}")[0]:
                return "import"
            status, text = self._run(
                "-m", "pytest", "-x", "-q", "-n", "2", "-m", FAST, "-p", "no:cacheprovider", *tests, limit_s=limit_s
            )
        finally:
            self._write(path, good)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        if status == NO_TESTS:
            return ""
        if status not in {0, 1, 2} and not failed:
            return f"(exit status {status})"
        return "" if status == 0 else failed[1] if failed else "(the tests do not start)"

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # it goes by the second and the size, which a small change leaves as they were

    def _run(self, *command: str, limit_s: int = LIMIT_S) -> tuple[int, str]:
        """Return the exit status and the output; 1 and a word where it takes longer than any test should."""
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                text, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return 1, "FAILED (time limit)"
            return process.returncode, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--paths", nargs="+", default=["ddpdoctor/rules", "ddpdoctor/launch"])
    parser.add_argument("--wide", nargs="*", default=["tests/rules", "tests/unit"])
    arguments = parser.parse_args()
    os.chdir(TREE)
    drawn = draw(arguments.paths, arguments.seed)[arguments.start : arguments.start + arguments.count]
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        left = []
        for number, (file, change) in enumerate(drawn, arguments.start):
            tests = nearest(copy.root, file, copy.known)
            found = copy.found_by(file, change, tests) if tests else ""
            if not found and arguments.wide:
                left.append((number, file, change))
            rows.append((f"{file}:{change.line}  {change.what[:90]}", found))
            print(f"{number:3} {rows[-1][0]}  |  {found or 'not seen by the nearest'}", flush=True)
        for number, file, change in left:
            found = copy.found_by(file, change, arguments.wide, WIDE_LIMIT_S)
            rows[number - arguments.start] = (rows[number - arguments.start][0], found)
            print(f"{number:3} {rows[number - arguments.start][0]}  |  {found or 'SURVIVED'}", flush=True)
    counted = [found for _, found in rows if found != "import"]
    print(f"found {sum(map(bool, counted))} of {len(counted)}; {len(rows) - len(counted)} cannot be imported")


if __name__ == "__main__":
    main()
