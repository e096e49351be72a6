"""What ddpdoctor answers to jobs rebuilt from public reports: python -m tests.bench.reports [NAME...]; ten minutes.

Prints the page docs/field-reports.md: one row a report. Each script in jobs.py is written from the description in
the issue that its first line links. It runs on CPUs under ``wrap --hang-timeout 8 --on-hang kill``, and its header says
what the answer has to be. A miss is run once more, because a busy machine may cause one; the row then says so.
KEEP_REPORTS names a folder to keep the run folders in.
"""

import datetime as dt
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.matrix.scenarios import lines_named, run_wrapped, wrong_with

JOBS = Path(__file__).with_name("jobs.py")
OPTIONS = ("--hang-timeout", "8", "--on-hang", "kill")
HEAD = """\
# Field reports

Jobs rebuilt from public reports of distributed training that hung, crashed or drifted, or seemed to, and what ddpdoctor
reported. We wrote each as a short script for CPUs and Gloo, from the description in the issue. The scripts are in
`tests/bench/reports/jobs.py`. The header of each has the expected answer: the kind, the ranks, and usually the line. A
healthy job must run to its end without a finding above info.

Made by `python -m tests.bench.reports` on {date}, with ddpdoctor {ddpdoctor} and torch {torch}, on a busy machine with
{cpus} CPUs. Seconds are for the whole job, including the start of torch.

| report | what went wrong there | what ddpdoctor answered | seconds | right |
|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A rebuilt job, with what its header says."""

    name: str
    url: str
    trouble: str
    truth: dict[str, Any]
    lines: list[str]

    @property
    def culprits(self) -> set[int]:
        """The lines of which one must be named; empty where none has to be."""
        marked = {number for number, line in enumerate(self.lines, 1) if line.endswith("# CULPRIT")}
        return marked if self.truth.get("line") else set()


def read_scripts() -> dict[str, Script]:
    imports, *jobs = JOBS.read_text().split("# job: ")
    scripts = (_read_script(imports, *job.split("\n", 1)) for job in jobs)
    return {script.name: script for script in scripts}


def _read_script(imports: str, name: str, text: str) -> Script:
    marks = ("# ", "report: ", "truth: ")
    url, trouble, truth = (line.partition(mark)[2] for line, mark in zip(text.splitlines(), marks, strict=False))
    lines = (imports + text).splitlines()
    return Script(name=name, url=url, trouble=trouble, truth=json.loads(truth), lines=lines)


def run_script(script: Script) -> tuple[str, str, float]:
    """Run the script under ``wrap``; return what is wrong with the answer, the answer in a cell, and the seconds."""
    truth = script.truth
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, f"{script.name}.py")
        path.write_text("\n".join(script.lines))
        kept = Path(os.environ.get("KEEP_REPORTS", folder), f"{script.name}-{time.time():.0f}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        status, report = run_wrapped(
            Path(sys.executable), kept, (*OPTIONS, f"--nproc-per-node={truth.get('nproc', 2)}", str(path))
        )
        took_s = time.monotonic() - began
    answer = describe(script, report.get("verdict"))
    if not report:
        return "no answer", answer, took_s
    if truth["code"] != "clean":
        kinds = {truth["code"], *truth.get("also", [])}
        return wrong_with(report["verdict"], kinds, truth["ranks"], path, script.culprits), answer, took_s
    alarms = ", ".join(found["kind"] for found in report["findings"] if found["severity"] != "info")
    return (f"false alarm: {alarms}" if alarms else f"exit status {status}" if status else ""), answer, took_s


def describe(script: Script, verdict: dict[str, Any] | None) -> str:
    """The verdict in a cell of a table."""
    if verdict is None:
        return "nothing, as it should be" if script.truth["code"] == "clean" else "nothing"
    said = f"{verdict['code']} {verdict['kind']}, ranks {', '.join(map(str, verdict['ranks']))}"
    numbers = sorted(lines_named(verdict, Path(f"{script.name}.py")))
    texts = [script.lines[number - 1].partition("  #")[0].strip() for number in numbers]
    return said + "".join(f"; `{text}`" for text in dict.fromkeys(texts))


def render_row(script: Script) -> tuple[str, bool]:
    """Run the script, twice if need be; return its row, and whether it is right."""
    fault, said, took_s = run_script(script)
    note = ""
    if fault:
        print(f"{script.name}: {fault}: {said}; once more", file=sys.stderr, flush=True)
        fault, said, took_s = run_script(script)
        note = " (second try)"
    name = script.url.removeprefix("https://github.com/").replace("/issues/", " #").replace("/pull/", " #")
    answer = "**no**: " + fault if fault else "yes" + note
    cells = (f"[{name}]({script.url})", script.trouble, said, f"{took_s:.0f}", answer)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |", not fault


def main() -> None:
    """Run the scripts of these names, or all, and print the page."""
    scripts = read_scripts()
    names = sys.argv[1:] or sorted(scripts)
    today = dt.datetime.now(dt.timezone.utc).date()
    versions = {package: version(package).partition("+")[0] for package in ("ddpdoctor", "torch")}
    print(HEAD.format(date=today, cpus=os.cpu_count(), **versions), flush=True)
    right = 0
    for name in names:
        row, is_right = render_row(scripts[name])
        right += is_right
        print(row, flush=True)
    print(f"\n{right} of {len(names)} are right.")


if __name__ == "__main__":
    main()
