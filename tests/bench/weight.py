"""How heavy each package of ddpdoctor is: python -m tests.bench.weight [--lower].

A tiny function has at most eight lines and is named once in its package, so a reader may as well find its body there.
``--lower`` writes the figures that ``tests/contract/test_weight.py`` holds, each only if it is lower than before.
"""

import ast
import functools
import json
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ddpdoctor"
HELD = Path(__file__).parents[1] / "data" / "weight.json"
MOST_LINES_OF_A_TINY_ONE = 8
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def weigh(folder: Path) -> dict[str, int]:
    """Return the number of files, lines of code, functions and tiny functions in a folder.

    Code leaves out blank lines, comments, docstrings and imports.
    """
    measured = [_measure(path) for path in sorted(folder.rglob("*.py"))]
    names = Counter(name for _, _, named in measured for name in named.elements())
    sizes = [found for _, functions, _ in measured for found in functions]
    tiny = sum(names[name] == 1 and size <= MOST_LINES_OF_A_TINY_ONE for name, size in sizes)
    code = sum(lines for lines, _, _ in measured)
    return {"files": len(measured), "code": code, "functions": len(sizes), "tiny": tiny}


@functools.cache
def _measure(path: Path) -> tuple[int, list[tuple[str, int]], Counter[str]]:
    """Return a file's lines of code, its functions with their lines, and how often it says each name."""
    text = path.read_text()
    left_out = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()[:1] in ("", "#")}
    sizes, names = [], Counter[str]()
    for node in ast.walk(ast.parse(text)):
        is_documented = isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
        doc = node.body[0] if is_documented else None
        for apart in (doc, node if isinstance(node, ast.Import | ast.ImportFrom) else None):
            if apart is not None:
                left_out.update(range(apart.lineno, (apart.end_lineno or apart.lineno) + 1))
        if isinstance(node, FUNCTIONS):
            own_doc = _lines(doc) if doc is not None else 0
            sizes.append((node.name, _lines(node) - own_doc))
        if isinstance(node, ast.Name | ast.Attribute):
            names[node.id if isinstance(node, ast.Name) else node.attr] += 1
    return len(text.splitlines()) - len(left_out), sizes, names


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def weigh_all() -> dict[str, dict[str, int]]:
    """Return the weight of each package, and of all."""
    folders = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    return {**{folder.name: weigh(folder) for folder in folders}, "all": weigh(PACKAGE)}


def main() -> None:
    """Print the weights beside those that are held."""
    now, held = weigh_all(), json.loads(HELD.read_text())
    for name, weight in now.items():
        figures = (f"{key} {value:6,} of {held.get(name, weight)[key]:6,}" for key, value in weight.items())
        print(f"{name:14}" + "   ".join(figures))
    if sys.argv[1:] == ["--lower"]:
        lower = {
            name: {key: min(value, held.get(name, weight)[key]) for key, value in weight.items()}
            for name, weight in now.items()
        }
        rows = (f"  {json.dumps(name)}: {json.dumps(weight)}" for name, weight in lower.items())
        HELD.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
