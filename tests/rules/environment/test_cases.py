"""Cases of machines and launches, below tests/data/environment: facts, and what a rule finds in them.

A case is "==== KIND ...: NAME" for one or several rules, and then rows. A row has what a node has beside its name:
processes and sections, written with the builders of `build` and `launches` (a healthy machine, and what is changed of
it); "with ..." begins what all rows of a case have. "." is a node with nothing more, "= ..." is a whole fleet, over
several lines if these are indented. Below a row, or below several with the same outcome, is all that the rule says:
"=> OUTCOME: WORDS", and each finding with its severity, its fix and more. Evidence is compared where a case has it.

``DDPDOCTOR_GOLDEN=write`` writes anew what the rules say, see `tests.golden`.
"""

import re

from ddpdoctor.model import node as records
from tests.golden import RULES, as_listed, by_case, shown
from tests.rules.environment import build, launches
from tests.rules.environment.build import ask, node


def given(*processes, host="node0", **sections):
    return node(host, processes=processes, **sections)


NAMES = {**vars(records), **vars(launches), **vars(build), "given": given}


def said_of(block, row):
    """Return what each of the case's rules says of a row."""
    row = row[2:] if row.startswith("= ") else f"given({row.removeprefix('.')}, {block.common})".replace("(, ", "(")
    facts = eval(row, NAMES)
    kinds = block.head.partition(": ")[0].split()
    first, *others = [as_listed(block, heard(kind, facts), ("  evidence: ", "  check: ")) for kind in kinds]
    assert others == [first] * len(others), kinds
    return first


def heard(kind, facts):
    """Return what a rule says, without its own name and that of the host."""
    lines = shown(ask(kind, facts))
    return [re.sub(rf"^(\w+): {kind}: ", r"\1: ", line) for line in lines]


test_rows = by_case(RULES.parent / "environment", "*.txt", said_of)
