"""Counts turns of phrase that no engineer would say, in the documentation and in the texts of the program.

python -m tests.english [PATTERN]    print the counts, or each place of one pattern
python -m tests.english --lower      hold the counts that fell in tests/data/english.json
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HELD = Path(__file__).parent / "data" / "english.json"
PATTERNS = {
    "fronted of": r"(?:^|[.;:] )Of (?:a|an|all|each|every|more|several|the|two)\b",
    "things that speak": r"\b(?:code|file|line|log|page|record|report|rule|run|script)s? (?:says?|speaks?|tells?)\b",
    "ranks that come": r"\b(?:host|node|process|rank)(?:e?s)? (?:came|comes?|hears?|meets?|met)\b",
    "nobody, whom": r"\b(?:anybody|nobody|somebody|whoever|whom)\b",
    "is no": r"\b(?:are|is|was|were) no (?!longer|more)\w+",
    "of its own": r"\bof (?:his|its|our|their|your) own\b|\bof (?:ours|yours)\b",
    "and not": r"\band not\b",
    "literary": r"\b(?:all the same|anew|as ever|at once|beforehand|besides|holds? against|in all|rests? on)\b",
}
"""The habits behind the turns, each with an expression that finds most of them."""


def texts() -> Iterator[tuple[Path, int, str]]:
    """Yield the lines of the pages, and the string literals and docstrings of the program, with file and line."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in pages if page.parent.name != "rules"]  # those are made from the pages below
    for path in sorted([*pages, *(ROOT / "ddpdoctor" / "rules" / "pages").glob("*.md")]):
        yield from ((path, number, line) for number, line in enumerate(path.read_text().splitlines(), 1))
    for path in sorted((ROOT / "ddpdoctor").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.lineno, node.value


def find() -> dict[str, list[str]]:
    """Return by pattern where it is found, once for each time."""
    found: dict[str, list[str]] = {name: [] for name in PATTERNS}
    patterns = {name: re.compile(pattern, re.MULTILINE) for name, pattern in PATTERNS.items()}
    for path, number, text in texts():
        for name, pattern in patterns.items():
            turns = (match[0].strip() for match in pattern.finditer(text))
            found[name] += [f"{path.relative_to(ROOT)}:{number}: {turn}" for turn in turns]
    return found


if __name__ == "__main__":
    found = find()
    counts = {name: len(places) for name, places in found.items()}
    if sys.argv[1:] == ["--lower"]:
        held = json.loads(HELD.read_text())
        HELD.write_text(json.dumps({name: min(number, held[name]) for name, number in counts.items()}, indent=1) + "\n")
    for name in sys.argv[1:]:
        print(*found.get(name, ()), sep="\n")
    print(*(f"{number:5} {name}" for name, number in counts.items()), f"{sum(counts.values()):5} in total", sep="\n")
