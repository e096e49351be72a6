"""Ten jobs, nine with a fault, that are run with each version of torch, and what must be said of them."""

import contextlib
import json
import subprocess
from collections.abc import Iterable, Sequence
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
    options, words = (f"--nproc-per-node={scenario.ranks}", *scenario.options), words_of(scenario.job)
    status, report = run_wrapped(python, folder, (*options, *words, *scenario.args))
    if scenario.kind is None or not report:
        said = "; ".join(found["summary"] for found in report.get("findings", ()))
        return (said or ("" if status == 0 else f"exit status {status}")) if report else "no report", report
    lines = set(marked_lines(scenario.job) if scenario.has_line else ())
    return wrong_with(report["verdict"], {scenario.kind}, scenario.blamed, Path(words[0]), lines), report


def run_wrapped(python: Path, folder: Path, words: Sequence[str]) -> tuple[int | None, dict[str, Any]]:
    """Run a job under ``wrap``; return its status, None where it took too long, and its report, empty if none."""
    front = ["-m", "ddpdoctor", "wrap", f"--master-port={free_port()}", "--report-dir", str(folder)]
    process = subprocess.Popen(
        [str(python), *front, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        cwd=folder.parent, env=clean_environment(), start_new_session=True,
    )  # fmt: skip
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return None, {}
    finally:
        kill_job(folder)
    with contextlib.suppress(OSError, ValueError):
        return process.returncode, json.loads((folder / "report.json").read_text())
    return process.returncode, {}


def wrong_with(
    verdict: dict[str, Any] | None, kinds: Iterable[str], blamed: Iterable[int], script: Path, lines: set[int]
) -> str:
    """Return what is wrong with a verdict, which must name one of the lines of a script, if there are any."""
    if verdict is None:
        return "no verdict"
    if verdict["kind"] not in kinds or sorted(verdict["ranks"]) != sorted(blamed):
        return f"{verdict['kind']} of ranks {verdict['ranks']}"
    return "" if not lines or lines & lines_named(verdict, script) else "another line"


def lines_named(verdict: dict[str, Any], script: Path) -> set[int]:
    """Return the lines of a script that a verdict names."""
    return {place["line"] for place in verdict["where"] if Path(place["file"]).stem == script.stem}
