"""Runs the scenarios of ``tests/standin`` with one version of torch, and makes the table of what came of them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from tests.matrix.environments import ROOT
from tests.standin.conftest import KNOWN

Outcomes = dict[str, dict[str, str]]
"""By job: the verdict, "none" if there was none, and what was wrong with it, empty if nothing was."""

HEAD = """## NCCL

torch's CUDA builds, with their own ProcessGroupNCCL, run these jobs on a stand-in for CUDA and NCCL
(`python -m tests.matrix --nccl`): torch's watchdog, flight recorder, reducer and aborts are real, NCCL's kernels and
networks are not. Most jobs have two ranks. "OFF" and "DETAIL" are the values of `TORCH_DISTRIBUTED_DEBUG`; "none"
is a job without `wrap`. Rows are from runs of several days. On a crowded machine jobs that measure time come out wrong
(straggler, no sync), and some reach their own limit. Not run with 2.8 are jobs whose gradients `wrap` watches: there
the stand-in ends the process in `torch._foreach_norm`.
"""


def try_nccl(torch: str, only: str) -> Outcomes:
    """Run every scenario that pytest's ``-k`` selects by ``only``, with a version of torch such as "2.14.1"."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "junit.xml")
        command = (
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "-m",
            "standin",
            f"--junitxml={file}",
            "-k",
            only,
            "tests/standin",
        )
        subprocess.run(command, cwd=ROOT, env={**os.environ, "STANDIN_TORCH": torch}, check=False)
        return _read(file.read_text())


def _read(junit: str) -> Outcomes:
    found: Outcomes = {}
    for test in ET.fromstring(junit).iter("testcase"):
        wrong = [one for kind in ("failure", "error", "skipped") for one in test.findall(kind)]  # expected or not
        why = " ".join(one.get("message", "").strip().partition("\n")[0][:80] for one in wrong)
        for said in test.iter("property"):
            found[said.get("name", "")] = {"verdict": said.get("value", ""), "wrong": why}
    return found


def render_nccl(tried: Mapping[str, Outcomes]) -> list[str]:
    """Return the section on NCCL."""
    versions = sorted(tried, key=lambda version: [int(part) for part in version.split(".")])
    rows = [HEAD, f"| job | mode | verdict | {' | '.join(versions)} |", "|---" * (3 + len(versions)) + "|"]
    for name in (name for name in KNOWN if any(name in outcomes for outcomes in tried.values())):
        cells = [_cell(tried[version].get(name)) for version in versions]
        right = next((o[name]["verdict"] for o in tried.values() if name in o and not o[name]["wrong"]), "")
        rows.append(f"| {' | '.join((_title(name), _mode(KNOWN[name]), right, *cells))} |")
    wrong = [
        f"- {_title(name)}, {_mode(KNOWN[name])}, torch {version}: {one['verdict']}."
        for version in versions
        for name, one in tried[version].items()
        if one["wrong"]
    ]
    return [*rows, "", *(["Wrong:\n", *wrong, ""] if wrong else [])]


def _cell(outcome: Mapping[str, str] | None) -> str:
    return "not run" if outcome is None else "wrong" if outcome["wrong"] else "right"


def _mode(job: Any) -> str:
    words = job.command
    if "--debug-level" in words:
        return str(words[words.index("--debug-level") + 1])
    return "DETAIL" if "wrap" in words else "none"


def _title(name: str) -> str:
    return name.removesuffix("_off").removesuffix("_detail").replace("_detail_", "_").replace("_", " ")
