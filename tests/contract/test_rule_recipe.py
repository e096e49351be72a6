"""A rule that follows CONTRIBUTING's recipe, and nothing else, is asked, shown, explained and listed."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

import pytest

from ddpdoctor.rules.registry import all_rules
from tests import kept
from tests.scenarios.first import FIRST, NIGHT, SECOND

pytestmark = pytest.mark.full

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


# What the README's test command runs shows each kind that any scenario shows, and each verb and launcher by a real job.


TABLES = [path for part in ("rules", "unit") for path in (ROOT / "tests" / part).rglob("test_*.py")]
TABLES += (path for part in ("[ej]*", "rules") for path in (ROOT / "tests" / "data").glob(f"{part}/*.txt"))
VERBS = (
    "wrap",
    "tune",
    "check-env",
    "check-rendezvous",
    "allreduce-bench",
    "check-data",
    "check-consistency",
    "report",
    "status",
    "history",
)
LAUNCHERS = ("torchrun", "accelerate", "mpirun", "launch.sh", "srun", "kubernetes", "spawn", "hosts")
ASK = "import sys, pytest, tests.contract.test_rule_recipe as t; sys.exit(pytest.main(sys.argv[1:], [t.Texts()]))"


class Texts:
    """A plugin that writes what each collected test says: its code, its parameters, its row of a table."""

    @staticmethod
    def pytest_collection_finish(session: pytest.Session) -> None:
        """Write it as JSON, behind all else."""
        first = {item.nodeid: item.get_closest_marker("full") is None for item in session.items}
        rows = {item.nodeid: [first[item.nodeid], kept.way_of(item), _text(item)] for item in session.items}
        sys.__stdout__.write("\n" + json.dumps(rows))  # type: ignore[union-attr]


def _text(item: typing.Any) -> str:
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    tables = [value for value in vars(item.module).values() if isinstance(value, dict)]
    rows = [table[value] for table in tables for value in values if isinstance(value, str) and value in table]
    return inspect.getsource(item.function) + repr([*values, *rows, item.path.name])


@pytest.fixture(scope="module")
def scenarios() -> dict[str, tuple[bool, str, str]]:
    """Return of each scenario whether it is run first, in which way it takes its jobs, and what it says."""
    command = [sys.executable, "-c", ASK, "--collect-only", "-q", "-m", "", "-p", "no:xdist", "tests/scenarios"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return {name: (first, way, text) for name, (first, way, text) in json.loads(line).items()}


def _says(text: str, *words: str) -> bool:
    return any(word in text and re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) for word in words)


def test_each_kind_that_any_scenario_shows_is_shown_first_or_by_a_table(
    scenarios: dict[str, tuple[bool, str, str]],
) -> None:
    tables = "".join(path.read_text() for path in TABLES)
    first = "".join(text for is_first, _, text in scenarios.values() if is_first)
    shown = [rule for rule in all_rules() if any(_says(text, rule.kind, rule.code) for *_, text in scenarios.values())]
    left_out = [
        rule.code for rule in shown
        if not _says(first, rule.kind, rule.code)
        and not _says(tables, f'"{rule.kind}"', f"==== {rule.kind}", rule.code)
        and not _says(tables, *(check.__name__ for check in rule.checks.values()))
    ]  # fmt: skip
    assert (left_out, len(shown) > len(all_rules()) / 2) == ([], True)


@pytest.mark.parametrize("word", [*VERBS, *LAUNCHERS])
def test_each_verb_and_launcher_is_shown_first(word: str, scenarios: dict[str, tuple[bool, str, str]]) -> None:
    source = {name: (ROOT / name.partition("::")[0]).read_text() for name in scenarios}
    real = {name: text for name, (first, way, text) in scenarios.items() if first and way != "kept"}
    assert any(_says(text, word) or word in source[name] for name, text in real.items())


def test_each_line_of_the_lists_names_a_scenario(scenarios: dict[str, tuple[bool, str, str]]) -> None:
    names = [name.replace("-real]", "]").replace("[real]", "") for name in scenarios]
    listed = [
        f"tests/scenarios/{file}::{start}" for tests in (FIRST, SECOND, NIGHT)
        for file, starts in tests.items() for start in starts
    ]  # fmt: skip
    assert [line for line in listed if not any(name.startswith(line) for name in names)] == []


def test_each_kept_run_belongs_to_a_scenario(scenarios: dict[str, tuple[bool, str, str]]) -> None:
    names = {re.sub(r"(?:-kept|\[kept)\]$", "", name) for name in scenarios}
    of_none = [path.name for path in kept.KEPT.glob("*.tar.xz") if kept.read_about(path)["test"] not in names]
    assert of_none == [], "git rm them"
