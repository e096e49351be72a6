"""DD106 over nodes whose versions are known."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.check_env import read_expected
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Outcome
from tests.rules.environment.build import ask, fleet, node
from tests.rules.environment.machine_facts import software, torch


def of(*expected, versions=("2.13.0+cu130", "2.13.0+cu130")):
    nodes = [
        node(host=f"node{number}", software=software(kernel="6.1.0-12-amd64"), torch=torch(version=version))
        for number, version in enumerate(versions)
    ]
    return replace(fleet(*nodes), expected=tuple(map(read_expected, expected)))


@pytest.mark.parametrize(
    "expected", ["torch==2.13.*", "torch>=2.6,<3", "Torch == 2.13.0", "kernel>=6.1", "python>=3.10"]
)
def test_versions_that_meet_the_expectation_pass(expected):
    assert ask("version-expected", of(expected))[0].outcome is Outcome.PASSED


def test_the_nodes_with_another_version_are_named():
    _, (finding,) = ask("version-expected", of("torch==2.13.*", "kernel>=6", versions=("2.13.0", "2.12.1")))
    assert finding.hosts == ("node1",)
    assert finding.summary == "torch is 2.12.1, but torch==2.13.* is expected"


def test_nothing_expected_is_skipped_and_what_is_not_known_is_no_pass():
    assert ask("version-expected", of())[0].outcome is Outcome.SKIPPED
    assert ask("version-expected", of("driver>=550"))[0].outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("text", ["torsh==2", "torch", "torch=2", "==2", "torch==2.13.*; rm", ""])
def test_what_is_no_expectation_is_refused(text):
    with pytest.raises(UserError, match="--expect-version is"):
        read_expected(text)
