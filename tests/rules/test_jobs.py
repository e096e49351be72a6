"""Cases of jobs, below tests/data/jobs: what each process does, as `wrap` sees it, and what is said of it.

A row is a job, written with the builders of `build`. Below it is whether it is sure that the job hangs ("certain",
"proven", or "open"), and each finding: severity, kind, summary and more. Evidence and a fix are compared where a case
has them.

``python -m tests.rules.test_jobs`` writes anew what is said, after a change of words, or below a new row and a line
"=> ". Read its diff: it writes what is, and not what should be.
"""

from pathlib import Path

import pytest

from ddpdoctor.diagnose.job import judge_job
from ddpdoctor.model import facts, reaching
from ddpdoctor.report.lines import format_ranks
from tests.golden import as_listed, blocks, rewrite
from tests.rules import build

DATA = Path(__file__).parents[1] / "data" / "jobs"
NAMES = {**vars(facts), **vars(reaching), **vars(build)}


def rows():
    for block in blocks(DATA):
        yield from (pytest.param(block, row, id=f"{block.head}: {row[:50]}") for row in block.rows)


def said_of(block, row):
    judged = judge_job(eval(row, dict(NAMES)))
    assert not [check for check in judged.checks if check.outcome == "crashed"]
    return as_listed(block, shown(judged), ("  evidence: ", "  fix: "))


@pytest.mark.parametrize(("block", "row"), list(rows()))
def test_what_is_said_of_a_job(block, row):
    assert said_of(block, row) == block.said


def shown(judged):
    """Return what was judged as lines: how sure it is that the job hangs, and all of each finding."""
    flags = [name for name in ("certain", "proven") if getattr(judged, name, False)]
    lines = [f"=> {', '.join([*flags] or ['open'])}" + ("" if judged.findings else ", nothing found")]
    for one in judged.findings:
        lines.append(f"{one.severity.value}: {one.kind}: {one.summary}")
        lines += [f"  fix: {one.fix}"] if one.fix else []
        lines += [f"  evidence: {text}" for text in one.evidence]
        places = [f"{place.file}:{place.line}" for place in one.where]
        more = {
            "": format_ranks(one.ranks), "hosts": ", ".join(one.hosts) if one.hosts != ("node0",) else "",
            "where": ", ".join(places), "confidence": one.confidence.value, "step": one.step, "tensor": one.tensor,
            "share": one.share, "origin": one.origin and one.origin.value,
        }  # fmt: skip
        said = [f"{name} {value}".strip() for name, value in more.items() if value not in (None, "", "high")]
        lines += [f"  at: {'; '.join(said)}"] if said else []
    return [line.replace("\n", "\\n") for line in lines]


if __name__ == "__main__":
    rewrite(DATA, said_of)
