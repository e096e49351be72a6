"""Cases of machines and launches, below tests/data/environment: facts, and what a rule finds in them.

A case is "==== KIND ...: NAME" for one or several rules, and then rows. A row has what a node has beside its name:
processes and sections, written with the builders of `build` and `launches` (a healthy machine, and what is changed of
it); "with ..." begins what all rows of a case have. "." is a node with nothing more, "= ..." is a whole fleet, over
several lines if these are indented. Below a row, or below several with the same outcome, is all that the rule says:
"=> OUTCOME: WORDS", and each finding with its severity, its fix and more. Evidence is compared where a case has it.

``python -m tests.rules.environment.test_cases`` writes anew what the rules say, after a change of words, or below a new
row and a line "=> " (and "  evidence: " for that). Read its diff: it writes what is, and not what should be.
"""

import itertools
from pathlib import Path

import pytest

from ddpdoctor.model import node as records
from ddpdoctor.model.findings import Confidence
from ddpdoctor.report.lines import format_ranks
from tests.golden import as_listed, blocks, rewrite
from tests.rules.environment import build, launches
from tests.rules.environment.build import ask, node

DATA = Path(__file__).parents[2] / "data" / "environment"


def given(*processes, host="node0", **sections):
    return node(host, processes=processes, **sections)


NAMES = {**vars(records), **vars(launches), **vars(build), "given": given}


def rows():
    for block in blocks(DATA):
        kinds, _, name = block.head.partition(": ")
        for kind, row in itertools.product(kinds.split(), block.rows):
            yield pytest.param(kind, block, row, id=f"{kind}: {name}: {row[:50]}")


def said_of(kind, block, row):
    """Return what a rule says of a row."""
    row = row[2:] if row.startswith("= ") else f"given({row.removeprefix('.')}, {block.common})".replace("(, ", "(")
    return as_listed(block, shown(*ask(kind, eval(row, NAMES))))


@pytest.mark.parametrize(("kind", "block", "row"), list(rows()))
def test_a_rule_says_of_facts(kind, block, row):
    assert said_of(kind, block, row) == block.said


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


def said_now(block, row):
    return said_of(block.head.split(maxsplit=1)[0].rstrip(":"), block, row)


if __name__ == "__main__":
    rewrite(DATA, said_now)
