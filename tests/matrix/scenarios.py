"""Ten jobs, nine with a fault, that are run with each version of torch, and what must be said of them."""

import contextlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scenarios.running import PATIENT, clean_environment, free_port, kill_job, marked_lines, words_of

LIMIT_S = 200
HANG_TIMEOUT = ("--hang-timeout", "6")
OFF = ("--debug-level", "OFF")


@dataclass(frozen=True)
class Scenario:
    """A job of ``tests/scenarios/jobs``, and the verdict on it: kind and ranks, None for a healthy one."""

    name: str
    job: str
    ranks: int
    kind: str | None
    blamed: tuple[int, ...] = ()
    options: tuple[str, ...] = HANG_TIMEOUT
    args: tuple[str, ...] = ()
    has_line: bool = True
    """Whether one line of the job is at fault."""


EVERY_HOOK = Scenario("healthy, with every hook in use", "every_hook", 2, None, options=PATIENT)
SCENARIOS = (
    EVERY_HOOK,
    Scenario(
        "a rank sleeps while another waits in tensor parallelism", "parallel", 2, "stuck", (1,),
        (*HANG_TIMEOUT, *OFF, "--on-hang", "kill"), ("tensor", "stuck"),
    ),
    Scenario("a rank gives a collective another dtype", "mismatch_dtype", 3, "mismatch", (0,)),
    Scenario("a collective behind `if rank == 0`", "mismatch_lone", 3, "mismatch", (0,), (*HANG_TIMEOUT, *OFF)),
    Scenario("a rank exits with status 0 before the others", "early_exit_return", 3, "early-exit", (2,)),
    Scenario("an exception in backward", "crash_backward", 4, "crash", (3,)),
    Scenario("memory cannot be allocated", "crash_memory_limit", 2, "crash", (1,), (*HANG_TIMEOUT, *OFF)),
    Scenario("recv waits for a send that comes after a barrier", "deadlock_message", 2, "deadlock", (0, 1)),
    Scenario("two slow ranks", "straggler_backward", 4, "straggler", (1, 3), (*PATIENT, *OFF)),
    Scenario(
        "a rank alone loads other parameters", "replicas", 3, "param-drift", (0,), PATIENT, ("wrong", "loaded"),
        has_line=False,
    ),
)  # fmt: skip


def run_scenario(scenario: Scenario, python: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    """Run a job under ``wrap`` in another environment; return what is wrong with the answer, and the report."""
    command = [
        str(python), "-m", "ddpdoctor", "wrap", f"--nproc-per-node={scenario.ranks}", f"--master-port={free_port()}",
        "--report-dir", str(folder), *scenario.options, *words_of(scenario.job), *scenario.args,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd=folder.parent,
        env=clean_environment(), start_new_session=True,
    )  # fmt: skip
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "no answer in time", {}
    finally:
        kill_job(folder)
    report = {}
    with contextlib.suppress(OSError, ValueError):
        report = json.loads((folder / "report.json").read_text())
    return (_wrong(scenario, process.returncode, report) if report else "no report"), report


def _wrong(scenario: Scenario, status: int, report: dict[str, Any]) -> str:
    verdict = report["verdict"]
    if scenario.kind is None:
        said = [found["summary"] for found in report["findings"]]
        return "; ".join(said) or ("" if status == 0 else f"exit status {status}")
    if verdict is None:
        return "no verdict"
    if (verdict["kind"], tuple(verdict["ranks"])) != (scenario.kind, scenario.blamed):
        return f"{verdict['kind']} of ranks {verdict['ranks']}"
    lines = set(marked_lines(scenario.job) if scenario.has_line else ())
    return "" if not lines or lines & {place["line"] for place in verdict["where"]} else "another line"
