"""Runs ``check-env`` on this machine and reads its report."""

import json
import subprocess
import sys
from typing import Any

from tests.scenarios.running import clean_environment, hold_to_schema

CHECK_ENV = (sys.executable, "-m", "ddpdoctor", "check-env", "--format", "json")
FOREIGN = (
    "NCCL_", "GLOO_", "TP_", "SLURM_", "SRUN_", "KUBERNETES_", "TORCHELASTIC_", "GROUP_", "LOCAL_", "NODE_RANK", "OMP_",
)  # fmt: skip


class Seen:
    """The report of one run."""

    def __init__(self, stdout: str, stderr: str, status: int) -> None:
        assert stdout.startswith("{"), stderr
        self.status, self.report, self.stderr = status, json.loads(stdout), stderr
        hold_to_schema(self.report)
        self.data = self.report["data"]
        self.checks = {check["id"]: check for check in self.report["checks"]}
        self.outcomes = {kind: check["outcome"] for kind, check in self.checks.items()}
        self.findings = [(one["kind"], one["severity"], one["summary"], one["fix"]) for one in self.report["findings"]]
        self.found = {one["kind"]: one for one in self.report["findings"]}

    def only(self) -> tuple[str, str, str, str]:
        (finding,) = self.findings
        return finding


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without what a check looks at, and these variables."""
    return {name: value for name, value in clean_environment().items() if not name.startswith(FOREIGN)} | variables


def read(process: Any) -> Seen:
    """Wait for a run that was started."""
    return Seen(*process.communicate(timeout=200), process.returncode)


def check_env(*arguments: str, before: tuple[str, ...] = (), torch: bool = False, **variables: str) -> Seen:
    """Run the checks that are named, behind the commands ``before``."""
    command = [*before, *CHECK_ENV, *(() if torch else ("--no-torch",)), *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL,
        env=environment(**variables),
    )  # fmt: skip
    return Seen(done.stdout, done.stderr, done.returncode)
