"""Write docs/rules from the pages of the rules: a page for each code, one for each family, and an index.

Also write the page of known errors, the list of decisions, and the skill that coding agents load.

python docs/generate.py             write what differs, remove pages of codes that are gone
python docs/generate.py --check     write nothing; exit status 1 where something differs
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.model.known_errors import read_known_errors
from ddpdoctor.rules.registry import all_rules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.rules.registry import Rule

FOLDER = Path(__file__).parent / "rules"
NOTICE = "<!-- Made by docs/generate.py from the page in ddpdoctor/rules/pages: change that and run it again. -->"
ERRORS_NOTICE = "<!-- Made by docs/generate.py from the table of known errors: change that and run it again. -->"
DECISIONS_NOTICE = "<!-- Made by docs/generate.py from the records in this folder: run it again after a change. -->"
SKILL = "../../ddpdoctor/skills/ddpdoctor/SKILL.md"
SKILL_HEAD = """---
name: ddpdoctor
description: >-
  Finds why a distributed PyTorch job (DDP, torchrun, Slurm, Kubernetes, NCCL, Gloo) hangs, crashes, is slow or
  does not start: which rank, which line, and what to do. Use it for hung or failed training jobs and their logs.
---
<!-- Made by docs/generate.py from docs/agents.md: change that and run it again. -->

"""
SITE = "https://github.com/ddpdoctor/ddpdoctor/blob/main/docs/"
INDEX_NOTICE = "<!-- Made by docs/generate.py from the rules: run it again after a change. -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rules about one subject, which share a page."""

    prefixes: tuple[str, ...]
    """How their codes begin."""
    page: str
    title: str
    verbs: tuple[str, ...]

    def members(self, rules: Iterable[Rule]) -> list[Rule]:
        """Return the rules of this family."""
        return [rule for rule in rules if rule.code.startswith(self.prefixes)]


FAMILIES = (
    Family(prefixes=("DD1",), page="software", title="Software, variables and limits", verbs=("check-env",)),
    Family(
        prefixes=("DD2",), page="network", title="Names, ports, networks and launch",
        verbs=("check-env", "check-rendezvous"),
    ),
    Family(prefixes=("DD3",), page="gpus", title="GPUs and links", verbs=("check-env",)),
    Family(prefixes=("DD4",), page="bandwidth", title="Bandwidth", verbs=("allreduce-bench",)),
    Family(prefixes=("DD5",), page="replicas", title="Replicas and gradients", verbs=("wrap", "check-consistency")),
    Family(
        prefixes=("DD6",), page="hangs", title="Hangs, crashes and slow ranks", verbs=("wrap", "attach", "analyze")
    ),
    Family(prefixes=("DD70",), page="data", title="Data", verbs=("wrap", "check-data")),
    Family(prefixes=("DD71", "DD72"), page="checkpoints", title="Checkpoints", verbs=("check-checkpoint",)),
    Family(prefixes=("DD8",), page="speed", title="Speed", verbs=("wrap", "tune", "analyze")),
    Family(prefixes=("DD9",), page="recording", title="What could not be recorded", verbs=("wrap",)),
)  # fmt: skip


def main() -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/rules from the pages of the rules.")
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
    pages |= {f"family-{family.page}.md": render_family(family, ordered) for family in FAMILIES}
    others = {"../known-errors.md": render_errors(), "../design/index.md": render_decisions(), SKILL: render_skill()}
    return pages | {"index.md": render_index(ordered)} | others


def render_errors() -> str:
    """Return the page of errors that everybody meets."""
    rows = [
        f"## {known.shown}\n\nIt means: {known.means}.\n\nAt fault: {known.fault}.\n\nWhat to do: {known.fix}.\n\n"
        f"Source: {as_link(known.source)}\n"
        for known in read_known_errors()
        if not known.loose
    ]
    head = (
        "# Known errors\n\nCommon errors: what they mean, what causes them, and how to fix them. "
        "`ddpdoctor wrap` and `ddpdoctor analyze` add this to their reports, and\n"
        '`ddpdoctor explain "TEXT OF THE ERROR"` prints it in the terminal.\n'
    )
    return "\n".join([ERRORS_NOTICE + "\n", head, *rows])


def as_link(source: str) -> str:
    """Return an address in the form of a link, and anything else as it is."""
    return f"<{source}>" if source.startswith("https://") and " " not in source else source


def file_name(rule: Rule) -> str:
    """Return the name of a rule's page."""
    return f"{rule.code}-{rule.kind}.md"


def render_page(rule: Rule) -> str:
    """Return a rule's page: its docstring under a heading."""
    return f"{NOTICE}\n\n# {rule.code} {rule.kind}\n\nSeverity: {rule.severity.value}.\n\n{rule.page.strip()}\n"


def render_family(family: Family, rules: Iterable[Rule]) -> str:
    """Return the table of a family's rules."""
    rows = (
        f"| [{rule.code}]({file_name(rule)}) | `{rule.kind}` | {rule.severity.value} | {rule.summary} |"
        for rule in family.members(rules)
    )
    verbs = ", ".join(f"[{verb}](../{verb}.md)" for verb in family.verbs)
    head = f"{INDEX_NOTICE}\n\n# {family.title}\n\nFound by {verbs}.\n\n"
    return head + "| code | kind | severity | what it means |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def render_index(rules: list[Rule]) -> str:
    """Return the list of all families."""
    rows = (
        f"| {', '.join(prefix.ljust(5, 'x') for prefix in family.prefixes)} "
        f"| [{family.title}](family-{family.page}.md) | {len(family.members(rules))} |"
        for family in FAMILIES
    )
    head = (
        f"{INDEX_NOTICE}\n\n# Codes\n\nEach finding has a code, and each code has a page: what it means, how it is "
        "recognized, how sure that is, and what to do. `ddpdoctor explain CODE` shows the page in the terminal.\n\n"
    )
    return head + "| codes | about | rules |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def render_decisions() -> str:
    """Return the list of decisions."""
    records = sorted((FOLDER.parent / "design").glob("0*.md"))
    titles = [path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in records]
    rows = (f"- [{title}]({path.name})\n" for title, path in zip(titles, records, strict=True))
    head = "# Decisions\n\nWhy ddpdoctor is built as it is, a page for each decision.\n\n"
    return f"{DECISIONS_NOTICE}\n\n{head}{''.join(rows)}"


def render_skill() -> str:
    """Return docs/agents.md as a skill, whose links lead to the documentation."""
    page = (FOLDER.parent / "agents.md").read_text(encoding="utf-8")
    return SKILL_HEAD + re.sub(r"\]\((?!https://)([^)]+)\)", rf"]({SITE}\1)", page)


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
