"""Tries ddpdoctor in one environment: check-env, the ten jobs, and which hooks the recorder found."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ddpdoctor.recorder.storage import ring_reading
from tests.matrix.scenarios import EVERY_HOOK, SCENARIOS, run_scenario
from tests.scenarios.running import clean_environment

CHECK_ENV_LIMIT_S = 200
VERSIONS = "import platform, torch; print(torch.__version__, platform.python_version())"


def try_all(python: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Return all that came of one combination, ready for JSON. What was right ``before`` is not run again."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        torch, version = _output(python, work, "-c", VERSIONS).split()
        results = {}
        known = before.get("scenarios", {})
        hooks = {name: before.get(name, []) for name in ("found", "lacks", "failures")}
        for number, scenario in enumerate(SCENARIOS):
            if known.get(scenario.name) == "":
                results[scenario.name] = ""
                continue
            folder = work / str(number)
            wrong, _ = run_scenario(scenario, python, folder)
            results[scenario.name] = wrong
            print(f"  {scenario.name}: {wrong or 'right'}", flush=True)
            if scenario is EVERY_HOOK:
                hooks = read_hooks(folder)
        return {
            "torch": torch, "python": version, "check_env": _check_env(python, work), "scenarios": results, **hooks
        }  # fmt: skip


def read_hooks(folder: Path) -> dict[str, list[str]]:
    """Return the hooks that were found, those that were missing, and the recorder's failures, of launcher and ranks."""
    notes = [note for ring in (folder / "rings").glob("*.ring") for note in ring_reading.read_ring_file(ring).notes]
    log = folder / "agent.jsonl"
    notes += [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    reported = [note for note in notes if note.get("k") == "hooks"]
    return {
        "found": sorted({hook for note in reported for hook in note["found"]}),
        "lacks": sorted({hook for note in reported for hook in note["lacks"]}),
        "failures": sorted({f"{note['hook']}: {note['error']}" for note in notes if note.get("k") == "defect"}),
    }


def _check_env(python: Path, work: Path) -> str:
    """Return the codes of what check-env found, or why it gave no answer."""
    try:
        text = _output(python, work, "-m", "ddpdoctor", "check-env", "--format", "json")
        report = json.loads(text)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return f"no answer: {error}"
    asked = [check for check in report["checks"] if check["outcome"] in ("passed", "found")]
    codes = ", ".join(sorted({found["code"] for found in report["findings"]})) or "nothing"
    return f"{codes} found, {len(asked)} checks ran"


def _output(python: Path, work: Path, *args: str) -> str:
    done = subprocess.run(
        [str(python), *args], capture_output=True, text=True, check=False, cwd=work, env=clean_environment(),
        timeout=CHECK_ENV_LIMIT_S,
    )  # fmt: skip
    return done.stdout
