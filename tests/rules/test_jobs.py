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
from tests.golden import OPTIONAL, as_listed, blocks, rewrite, shown, valued
from tests.rules import build

DATA = Path(__file__).parents[1] / "data" / "jobs"
NAMES = {**vars(facts), **vars(reaching), **vars(build)}


def rows():
    for block in blocks(DATA):
        yield from (pytest.param(block, row, id=f"{block.head}: {row[:50]}") for row in block.rows)


def said_of(block, row):
    judged = judge_job(valued(block, row, NAMES))
    return as_listed(block, shown(judged, build.sureness), OPTIONAL)


@pytest.mark.parametrize(("block", "row"), list(rows()))
def test_what_is_said_of_a_job(block, row):
    assert said_of(block, row) == block.said


if __name__ == "__main__":
    rewrite(DATA, said_of)
