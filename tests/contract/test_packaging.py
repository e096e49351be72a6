"""Extras and their pins, the workflows of GitHub, the container image, and the skill for agents."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ddpdoctor.cli.verbs import SKILL
from tests.needs import need_programs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = {"dev", "lint", "ci", "docs"}  # for those who work on ddpdoctor


def pins() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_each_requirement_has_a_tested_version(extra: str) -> None:
    wanted = map(Requirement, EXTRAS[extra] if extra else PROJECT["dependencies"])
    names = {canonicalize_name(requirement.name) for requirement in wanted} - {"ddpdoctor"}
    assert names - pins() - {"tomli", "packaging"} == set()


def test_the_page_on_installing_lists_each_extra_of_users() -> None:
    named = re.findall(r"'\.\[(\w+)\]'", (ROOT / "docs" / "install.md").read_text())
    assert set(named) == EXTRAS.keys() - OWN


def test_ci_installs_all_that_a_test_else_skips_for() -> None:
    (own, *_) = (Requirement(text) for text in EXTRAS["ci"])
    (of_tests, *_) = (Requirement(text) for text in EXTRAS["dev"])
    assert own.extras | of_tests.extras == EXTRAS.keys() - {"ci"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_runs_what_anybody_can_run_and_may_change_nothing(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    ours = [word for step in steps for word in step.get("run", "").split() if word.startswith(".ci/")]
    assert ours
    assert all(os.access(ROOT / program, os.X_OK) for program in ours)
    # Only the job that publishes, and runs nothing of the repository, gets a right: to prove to PyPI who it is.
    for job in jobs:
        rights = job.get("permissions", {})
        assert rights in ({}, {"id-token": "write"})
        assert not (rights and any("run" in step or "checkout" in step["uses"] for step in job["steps"]))


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in text.splitlines() if line]


def test_the_image_copies_what_is_there_and_has_the_tested_torch() -> None:
    steps = instructions()
    assert {name for name, _ in steps} <= {"FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD"}
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = [shlex.split(words)[:-1] for name, words in steps if name == "COPY" and "--from" not in words]
    assert {source for sources in copied for source in sources} == sent
    assert all((ROOT / source).exists() for source in sent)
    torch = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    assert f"torch=={torch[1]} " in " ".join(words for name, words in steps if name == "RUN")
    assert dict(steps)["ENTRYPOINT"] == '["ddpdoctor"]'


@pytest.mark.nightly
@pytest.mark.full
def test_the_image_is_built_and_reads_a_log(tmp_path: Path) -> None:
    need_programs("docker")
    running = subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=60).returncode == 0
    if not running:
        pytest.skip("no docker daemon answers")
    subprocess.run(["docker", "build", "-t", "ddpdoctor-test", str(ROOT)], check=True, timeout=280)
    (tmp_path / "train.log").write_text("[rank1]: ValueError: bad sample\n")
    command = ["docker", "run", "--rm", "-v", f"{tmp_path}:/logs:ro", "ddpdoctor-test", "analyze", "/logs/train.log"]
    assert "DD604" in subprocess.run(command, capture_output=True, text=True, check=False, timeout=100).stdout


def test_the_skill_says_when_to_use_it_and_leads_out_of_the_clone_only_by_address() -> None:
    _, head, body = (SKILL / "SKILL.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields.keys() == {"name", "description"}
    assert fields["name"] == SKILL.name
    assert 100 < len(fields["description"]) <= 1024
    links = re.findall(r"\]\(([^)]+)\)", body)
    assert links
    assert all(link.startswith("https://") for link in links)
