"""The page about versions of torch, from what was tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpdoctor.recorder.calls import RENAMED
from ddpdoctor.rules.progress.hook_losses import LOSSES
from tests.matrix.scenarios import SCENARIOS

Tried = dict[str, Any]

HEAD = """<!-- Made by python -m tests.matrix: run it again after a change. -->

# Versions of torch and Python

ddpdoctor supports torch 2.6 and later, on Python 3.10 and later. Each combination below was installed from the package
index and tried by `python -m tests.matrix`: `check-env`, ten jobs of two to four ranks on Gloo under `wrap`, and a
look at which of the recorder's hooks found their place in torch. CUDA builds ran without a GPU, so nothing here speaks
of NCCL. Where a combination was given fewer than ten jobs, the table says how many.
"""
HOOKS_HEAD = """## Hooks

The recorder replaces functions of torch, and reads some that are private. Where a version lacks one, the job runs on,
the others work, and a report says once what is lost
([DD901](rules/DD901-not-recorded.md)). A collective that a version does not have is no loss: no script can call it.
"""


def render(tried: Sequence[Tried], wanted: Sequence[tuple[str, str]]) -> str:
    """Return the page; combinations that are ``wanted`` and were not tried are named on it."""
    ordered = sorted(tried, key=_order)
    ran = [one for one in ordered if "scenarios" in one]
    return "\n".join(
        [HEAD, *_combinations(ordered), "", *_missing(ordered, wanted), *_jobs(ran), "", HOOKS_HEAD, *_hooks(ran), ""]
    )


def _order(one: Tried) -> list[list[int]]:
    return [[int(part) for part in version.split(".")] for version in one["asked"]]


def _combinations(tried: Sequence[Tried]) -> list[str]:
    rows = ["| torch | Python | jobs right | hooks found | hooks missing | check-env |", "|---|---|---|---|---|---|"]
    for one in tried:
        torch, python = one["asked"]
        if "scenarios" not in one:
            rows.append(f"| {torch} | {python} | {one['not_run']} | | | |")
            continue
        right = sum(not wrong for wrong in one["scenarios"].values())
        lacks = ", ".join(f"`{hook}`" for hook in one["lacks"]) or "none"
        jobs = f"{right} of {len(one['scenarios'])}"
        cells = (one["torch"], one["python"], jobs, str(len(one["found"])), lacks, one["check_env"])
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
    return [
        "The jobs. `wrap` is right where it names the kind, exactly the ranks, and the line at fault, if any:\n",
        *(f"- {scenario.name}: {scenario.kind or 'no finding'}" for scenario in SCENARIOS),
        *(["\nWrong answers:\n", *wrong] if wrong else ["\nNo answer was wrong."]),
        *(["\nFailures of the recorder that it swallowed:\n", *failed] if failed else []),
    ]


def _recorded(one: Tried) -> set[str]:
    """Return the hooks that were found, and the old names of collectives that are recorded under a new one."""
    found = set(one["found"])
    return found | {f"distributed_c10d.{old}" for new, old in RENAMED.items() if f"distributed_c10d.{new}" in found}


def _hooks(ran: Sequence[Tried]) -> list[str]:
    """Return what differs between versions, and what each hook is for."""
    every = {hook for one in ran for hook in one["found"]}
    differing = {hook: [one for one in ran if hook not in _recorded(one)] for hook in sorted(every)}
    rows = [
        f"| `{hook}` | {', '.join(dict.fromkeys(one['asked'][0] for one in without))} | "
        f"{LOSSES.get(hook, 'nothing: no script can call it there')} |"
        for hook, without in differing.items()
        if without
    ]
    table = ["| hook | not in torch | what is lost |", "|---|---|---|", *rows] if rows else []
    same = sum(not without for without in differing.values())
    return [*table, "", f"{same} hooks are found in every version that was tried."]
