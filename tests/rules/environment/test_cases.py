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
import tempfile
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


def blocks(path):
    """Return the parts of a file: its lines as they stand, and of rows with one outcome: kinds, rows, what is said."""
    kinds, common, texts, said = [], "", [], []
    lines = path.read_text(encoding="utf-8").split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(("=> ", *OF_A_FINDING)):
            said.append(line)
            if not following.startswith(OF_A_FINDING):
                yield kinds, [(text, _row(text, common)) for text in texts], said
                texts, said = [], []
        elif line.startswith("  "):
            texts[-1] += "\n" + line
        elif line and not line.startswith(("# ", "with ", "==== ")):
            texts.append(line)
        else:
            if line.startswith("==== "):
                kinds, common = line[5:].partition(": ")[0].split(), ""
            common = line[5:] if line.startswith("with ") else common
            yield line


def _row(text, common):
    row = text[2:] if text.startswith("= ") else f"given({text.removeprefix('.')}, {common})"
    return row.replace("(, ", "(")


def rows():
    """Return each row: for which rule, its facts, and what the rule says."""
    for path in sorted(DATA.glob("*.txt")):
        for kinds, texts, said in (block for block in blocks(path) if isinstance(block, tuple)):
            for kind, (text, row) in itertools.product(kinds, texts):
                yield pytest.param(kind, row, said, id=f"{kind}: {text[:60]}")


def judged(kind, row, said, folder):
    """Return what a rule says of a row, with its evidence where the case has some."""
    found = shown(*ask(kind, eval(row, {**NAMES, "tmp_path": folder})))
    with_evidence = any(line.startswith("  evidence: ") for line in said)
    return [line for line in found if with_evidence or not line.startswith("  evidence: ")]


@pytest.mark.parametrize(("kind", "row", "said"), list(rows()))
def test_a_rule_says_of_facts(tmp_path, kind, row, said):
    assert judged(kind, row, said, tmp_path) == said


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


def rewrite(path):
    """Write what the rules say now below the rows of a file."""
    lines = []
    for block in blocks(path):
        if isinstance(block, str):
            lines.append(block)
            continue
        kinds, texts, said = block
        found = []
        for _, row in texts:
            with tempfile.TemporaryDirectory() as folder:
                found.append(judged(kinds[0], row, said, Path(folder)))
        for (text, _), now, after in zip(texts, found, [*found[1:], None], strict=True):
            lines += [text] if now == after else [text, *now]
    path.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    for changed in sorted(DATA.glob("*.txt")):
        rewrite(changed)
