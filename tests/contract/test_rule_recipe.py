"""A rule that follows CONTRIBUTING's recipe, and nothing else, is asked, shown, explained and listed."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPE = textwrap.dedent(re.search(r" *```python\n(.*?)```", CONTRIBUTING, re.DOTALL)[1])
PAGE = textwrap.dedent(re.search(r" *```markdown\n(.*?)```", CONTRIBUTING, re.DOTALL)[1])
FAMILIES = {
    "environment": ("DD199", "Node", "ddpdoctor.model.node"),
    "rendezvous": ("DD299", "Meeting", "ddpdoctor.rules.rendezvous.mesh"),
    "bandwidth": ("DD499", "Measured", "ddpdoctor.rules.bandwidth.curves"),
    "consistency": ("DD599", "Job", "ddpdoctor.model.facts"),
    "progress": ("DD699", "JobState", "ddpdoctor.rules.progress.job_state"),
    "data": ("DD799", "Shares", "ddpdoctor.model.data"),
    "checkpoints": ("DD798", "Checkpoints", "ddpdoctor.model.saved"),
}
BY_TABLE = """
import sys
from ddpdoctor.diagnose.bandwidth import BenchReportOptions, build_report
from ddpdoctor.diagnose.rendezvous import judge
from ddpdoctor.report.formats import render_json
from tests.rules.bandwidth.build import bench
from tests.rules.rendezvous.build import healthy
print(render_json(build_report(bench(), BenchReportOptions())))
print("----")
print([finding.code for finding in judge(healthy(2), "", "").findings])
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of ddpdoctor with one more module in each family, made from the recipe."""
    folder: Path = tmp_path_factory.mktemp("house")
    shutil.copytree(ROOT / "ddpdoctor", folder / "ddpdoctor", ignore=shutil.ignore_patterns("__pycache__"))
    for family, (code, about, module) in FAMILIES.items():
        text = RECIPE.replace("DD6NN", code).replace("made-up", f"made-up-{family}")
        text = text.replace("ddpdoctor.rules.progress.job_state import JobState", f"{module} import {about}")
        (folder / "ddpdoctor" / "rules" / family / "made_up.py").write_text(text.replace("JobState", about))
        (folder / "ddpdoctor" / "rules" / "pages" / f"{code}.md").write_text(PAGE)
    return folder


def run(house, *arguments):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(house), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=house, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def codes(report):
    return {finding["code"] for finding in report["findings"]} & {code for code, *_ in FAMILIES.values()}


def test_it_is_listed_and_explained(house):
    listed = run(house, "-m", "ddpdoctor", "explain", "--list").stdout
    for family, (code, *_) in FAMILIES.items():
        assert re.search(rf"{code} +made-up-{family} ", listed), listed
    page = run(house, "-m", "ddpdoctor", "explain", "made-up-progress").stdout
    assert "What it means" in page
    assert "DD199" in run(house, "-m", "ddpdoctor", "check-env", "--list", "made-up-environment").stdout


@pytest.mark.parametrize(
    ("verb", "found"),
    [
        (("check-env", "made-up-environment", "--no-torch"), {"DD199"}),
        (("check-data", "--samples", "64", "--world-size", "2", "--batch-size", "8"), {"DD799"}),
        (("check-checkpoint", str(Path(__file__))), {"DD798"}),
    ],
)
def test_it_is_in_the_report_of_its_verb(house, verb, found):
    ran = run(house, "-m", "ddpdoctor", *verb, "--format", "json")
    report = json.loads(ran.stdout)
    assert codes(report) == found, ran.stderr
    assert {check["code"] for check in report["checks"] if check["id"].startswith("made-up")} == found


def test_it_is_in_the_report_of_wrap(house, tmp_path):
    ran = run(house, "-m", "ddpdoctor", "wrap", "--report-dir", str(tmp_path / "run"), "--", sys.executable, "-c", "0")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert codes(report) == {"DD599", "DD699"}, ran.stderr
    assert "DD699" in ran.stderr


def test_it_is_in_the_report_of_nodes_that_meet_and_of_a_bench(house):
    ran = run(house, "-c", BY_TABLE)
    bench, _, met = ran.stdout.partition("----")
    assert codes(json.loads(bench)) == {"DD499"}, ran.stderr
    assert "DD299" in met
