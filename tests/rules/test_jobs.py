"""Cases of jobs, below tests/data/jobs: what each process does, as `wrap` sees it, and what is said of it.

A row is a job, written with the builders of `build`. Below it is whether it is sure that the job hangs ("certain",
"proven", or "open"), and each finding: severity, kind, summary and more. Evidence and a fix are compared where a case
has them.
"""

from ddpdoctor.diagnose.job import judge_job
from ddpdoctor.model import facts, launch
from tests.golden import RULES, table
from tests.rules import build

test_rows = table(
    "*", vars(facts), vars(launch), vars(build), head=build.sureness, folder=RULES.parent / "jobs", judge=judge_job
)
