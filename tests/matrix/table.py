"""The page about versions of torch, from what was tried."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddpdoctor.recorder.calls import RENAMED
from ddpdoctor.rules.progress.recording import read_losses
from tests.matrix.nccl import Outcomes, render_nccl
from tests.matrix.scenarios import SCENARIOS

Tried = dict[str, Any]
COLLECTIVES = ("distributed_c10d.", "_c10d_functional.")

HEAD = """<!-- Made by python -m tests.matrix: run it again after a change. -->

# Versions of torch and Python

ddpdoctor supports torch 2.6 and later, on Python 3.10 and later. Each combination below was tried by
`python -m tests.matrix`: `check-env`, ten jobs of two to four ranks on Gloo under `wrap`, and which of the recorder's
hooks found their place in torch. If a combination ran fewer than ten jobs, the table shows how many.
Counts of hooks differ if the recorder had fewer hooks at the time. "NCCL" is how many jobs of
[the section on NCCL](#nccl) were right, with Python 3.11 and the CUDA build of that version.
"""
HOOKS_HEAD = """## Hooks

The recorder replaces functions of torch, and reads some that are private. Where a version lacks one, the job runs on,
the others work, and a report lists what is lost ([DD901](rules/DD901-not-recorded.md)).
A collective that a version does not have does not count as lost: no script can call it.
"""


def render(tried: Sequence[Tried], wanted: Sequence[tuple[str, str]], nccl: Mapping[str, Outcomes]) -> str:
    """Return the page; combinations that are ``wanted`` and were not tried are named on it."""
    ordered = sorted(tried, key=_order)
    ran = [one for one in ordered if "scenarios" in one]
    parts = [HEAD, *_combinations(ordered, nccl), "", *_missing(ordered, wanted), *_jobs(ran), "", *render_nccl(nccl)]
    return "\n".join([*parts, HOOKS_HEAD, *_hooks(ran), ""])


def _order(one: Tried) -> list[list[int]]:
    return [[int(part) for part in version.split(".")] for version in one["asked"]]


def _combinations(tried: Sequence[Tried], nccl: Mapping[str, Outcomes]) -> list[str]:
    heads = ("torch", "Python", "jobs right", "NCCL", "hooks found", "hooks missing", "check-env")
    rows = [f"| {' | '.join(heads)} |", f"{'|---' * len(heads)}|"]
    for one in tried:
        torch, python = one["asked"]
        if "scenarios" not in one:
            rows.append(f"| {torch} | {python} | {one['not_run']} | | | | |")
            continue
        right = sum(not wrong for wrong in one["scenarios"].values())
        lacks = ", ".join(f"`{hook}`" for hook in one["lacks"]) or "none"
        jobs = f"{right} of {len(one['scenarios'])}"
        outcomes = nccl.get(one["torch"].partition("+")[0], {})
        devices = f"{sum(not o['wrong'] for o in outcomes.values())} of {len(outcomes)}" if outcomes else "not run"
        cells = (one["torch"], one["python"], jobs, devices, str(len(one["found"])), lacks, one["check_env"])
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _missing(tried: Sequence[Tried], wanted: Sequence[tuple[str, str]]) -> list[str]:
    known = {tuple(one["asked"]) for one in tried}
    left: dict[str, list[str]] = {}
    for torch, python in wanted:
        if (torch, python) not in known:
            left.setdefault(torch, []).append(python)
    rows = [f"- torch {torch}: Python {', '.join(pythons)}" for torch, pythons in left.items()]
    return ["Not tried yet:\n", *rows, ""] if rows else []


def _jobs(ran: Sequence[Tried]) -> list[str]:
    wrong = [
        f"- torch {one['torch']}, Python {one['python']}, {name}: {what}"
        for one in ran
        for name, what in one["scenarios"].items()
        if what
    ]
    failed = [f"- torch {one['torch']}, Python {one['python']}: {what}" for one in ran for what in one["failures"]]
    notes = [f"- torch {one['torch']}, Python {one['python']}: {one['note']}" for one in ran if one.get("note")]
    return [
        "The jobs. `wrap` is right if it names the kind, exactly the ranks, and the line at fault, if any:\n",
        *(f"- {scenario.name}: {scenario.kind or 'no finding'}" for scenario in SCENARIOS),
        *(["\nNotes:\n", *notes] if notes else []),
        *(["\nWrong answers:\n", *wrong] if wrong else ["\nNo other answer was wrong."]),
        *(["\nFailures of the recorder that it swallowed:\n", *failed] if failed else []),
    ]


def _recorded(one: Tried) -> set[str]:
    """Return the hooks that were found, and the old names of collectives that are recorded under a new one."""
    found = set(one["found"])
    # An earlier recorder did not look for every hook of today's: only what was looked for can be missing.
    found |= read_losses("hooks").keys() - set(one["lacks"])
    return found | {f"distributed_c10d.{old}" for new, old in RENAMED.items() if f"distributed_c10d.{new}" in found}


def _hooks(ran: Sequence[Tried]) -> list[str]:
    """Return the collectives that some versions lack. A version has what any combination with it has found."""
    by_torch: dict[str, set[str]] = {}
    for one in ran:
        by_torch.setdefault(one["asked"][0], set()).update(_recorded(one))
    every = sorted(hook for hook in set().union(*by_torch.values()) if hook.startswith(COLLECTIVES))
    rows = [
        f"| `{hook}` | {', '.join(torch for torch, found in by_torch.items() if hook not in found)} |"
        for hook in every
        if any(hook not in found for found in by_torch.values())
    ]
    return ["| collective | not in torch |", "|---|---|", *rows] if rows else []
