"""Write docs/rules from the docstrings of the rules, a page a code and an index.

python docs/generate.py             write what differs, remove pages of codes that are gone
python docs/generate.py --check     write nothing; exit status 1 where something differs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.rules.progress.known_errors import KNOWN_ERRORS
from ddpdoctor.rules.registry import all_rules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.rules.registry import Rule

FOLDER = Path(__file__).parent / "rules"
NOTICE = "<!-- Made by docs/generate.py from the rule's docstring: change that and run it again. -->"
ERRORS_NOTICE = "<!-- Made by docs/generate.py from the table of known errors: change that and run it again. -->"
INDEX_NOTICE = "<!-- Made by docs/generate.py from the rules: run it again after a change. -->"


def main() -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/rules from the docstrings of the rules.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where something differs")
    options = parser.parse_args()
    wanted = render_pages(all_rules())
    drifted = find_drift(wanted, FOLDER)
    for name in drifted:
        print(f"{'differs' if options.check else 'written'}: docs/rules/{name}")
    if options.check:
        return 1 if drifted else 0
    write_pages(wanted, drifted, FOLDER)
    return 0


def render_pages(rules: Iterable[Rule]) -> dict[str, str]:
    """Return the text of each page by file name, the index included."""
    ordered = sorted(rules, key=lambda rule: rule.code)
    pages = {file_name(rule): render_page(rule) for rule in ordered}
    return pages | {"index.md": render_index(ordered), "../known-errors.md": render_errors()}


def render_errors() -> str:
    """Return the page of errors that everybody meets."""
    rows = [
        f"## {known.shown}\n\nIt means: {known.means}.\n\nAt fault: {known.fault}.\n\nWhat to do: {known.fix}.\n\n"
        f"Source: {known.source}\n"
        for known in KNOWN_ERRORS
    ]
    head = (
        "# Known errors\n\nWhat the errors mean that everybody meets, whose fault each is, and what to do. "
        '`ddpdoctor wrap` says it in its report, and `ddpdoctor explain "TEXT OF THE ERROR"` in the terminal.\n'
    )
    return "\n".join([ERRORS_NOTICE + "\n", head, *rows])


def file_name(rule: Rule) -> str:
    """Return the name of a rule's page."""
    return f"{rule.code}-{rule.kind}.md"


def render_page(rule: Rule) -> str:
    """Return a rule's page: its docstring under a heading."""
    return f"{NOTICE}\n\n# {rule.code} {rule.kind}\n\nSeverity: {rule.severity.value}.\n\n{rule.page.strip()}\n"


def render_index(rules: Iterable[Rule]) -> str:
    """Return the list of all rules."""
    rows = (
        f"| [{rule.code}]({file_name(rule)}) | `{rule.kind}` | {rule.severity.value} | {rule.summary} |"
        for rule in rules
    )
    head = f"{INDEX_NOTICE}\n\n# The rules\n\n| code | kind | severity | what it means |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def find_drift(wanted: dict[str, str], folder: Path) -> list[str]:
    """Return the names of pages that are missing, differ, or should not be there."""
    files = {path.name: path for path in folder.glob("*.md")} | {name: folder / name for name in wanted}
    present = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def write_pages(wanted: dict[str, str], names: Iterable[str], folder: Path) -> None:
    """Write the named pages, and remove those that are not wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in wanted:
            (folder / name).write_text(wanted[name], encoding="utf-8")
        else:
            (folder / name).unlink()


if __name__ == "__main__":
    sys.exit(main())
