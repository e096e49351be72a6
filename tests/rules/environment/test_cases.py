"""Cases of machines and launches, below tests/data/environment: facts, and what a rule finds in them.

A case is "==== KIND ...: NAME" for one or several rules, and then rows. A row has what a node has beside its name:
processes and sections, written with the builders of `build` and `launches` (a healthy machine, and what is changed of
it); "with ..." begins what all rows of a case have. "." is a node with nothing more, "= ..." is a whole fleet, over
several lines if these are indented. Below a row, or below several with the same outcome, is all that the rule says:
"=> OUTCOME: WORDS", and each finding with its severity, its fix and more. Evidence is compared where a case has it.
"""

import re
from pathlib import Path

import pytest

from ddpdoctor.model import node as records
from ddpdoctor.model.findings import Confidence
from ddpdoctor.report.lines import format_ranks
from tests.rules.environment import build, launches
from tests.rules.environment.build import ask, node

DATA = Path(__file__).parents[2] / "data" / "environment"
WORDS = ("error", "warning", "info", "  fix", "  evidence", "  ranks", "  hosts", "  confidence", "  kind")
OF_A_FINDING = tuple(f"{word}: " for word in WORDS)


def given(*processes, host="node0", **sections):
    return node(host, processes=processes, **sections)


NAMES = {**vars(records), **vars(launches), **vars(build), "given": given}


def rows():
    """Return each row: for which rule, its text, and what the rule says."""
    for path in sorted(DATA.glob("*.txt")):
        for case in re.split(r"^==== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            head, *lines = case.rstrip("\n").split("\n")
            kinds, _, name = head.partition(": ")
            common, texts, said = "", [], []
            for line, following in zip(lines, [*lines[1:], ""], strict=True):
                is_said = line.startswith(("=> ", *OF_A_FINDING))
                if is_said:
                    said.append(line)
                elif line.startswith("with "):
                    common = line[5:]
                elif line.startswith("  "):
                    texts[-1] += "\n" + line
                elif not line.startswith("# "):
                    texts.append(line)
                if is_said and not following.startswith(OF_A_FINDING):
                    for text in texts:
                        row = text[2:] if text.startswith("= ") else f"given({text.removeprefix('.')}, {common})"
                        for kind in kinds.split():
                            yield pytest.param(kind, row.replace("(, ", "("), said, id=f"{kind}: {name}: {text[:50]}")
                    texts, said = [], []


@pytest.mark.parametrize(("kind", "row", "said"), list(rows()))
def test_a_rule_says_of_facts(tmp_path, kind, row, said):
    found = shown(*ask(kind, eval(row, {**NAMES, "tmp_path": tmp_path})))
    with_evidence = any(line.startswith("  evidence: ") for line in said)
    assert [line for line in found if with_evidence or not line.startswith("  evidence: ")] == said


def shown(check, findings):
    """Return how a check came out, and all of each finding that is not its default, as lines."""
    lines = [f"=> {check.outcome.value}: {check.reason}{check.seen}".rstrip(": ")]
    for one in findings:
        lines.append(f"{one.severity.value}: {one.summary}")
        lines += [f"  fix: {one.fix}"] if one.fix else []
        lines += [f"  evidence: {text}" for text in one.evidence]
        where = {
            "kind": one.kind if one.kind != check.id else "",
            "ranks": format_ranks(one.ranks), "hosts": ", ".join(one.hosts) if one.hosts != ("node0",) else "",
            "confidence": "" if one.confidence is Confidence.HIGH else one.confidence.value,
        }  # fmt: skip
        lines += [f"  {name}: {value}" for name, value in where.items() if value]
    return [line.replace("\n", "\\n") for line in lines]
