"""Where the faults lie that a rule finds, by the beginning of its code."""

from __future__ import annotations

from ddpdoctor.model.findings import Origin

ORIGINS = {
    "DD1": Origin.SETTINGS,
    "DD20": Origin.NETWORK, "DD21": Origin.NETWORK, "DD22": Origin.NETWORK, "DD23": Origin.SETTINGS,
    "DD30": Origin.MACHINE, "DD31": Origin.MACHINE, "DD32": Origin.MACHINE, "DD33": Origin.NETWORK,
    "DD305": Origin.SETTINGS, "DD306": Origin.SETTINGS,
    "DD401": Origin.MACHINE, "DD402": Origin.MACHINE, "DD403": Origin.NETWORK, "DD404": Origin.MACHINE,
    "DD405": Origin.NETWORK,
    "DD5": Origin.SCRIPT,
    "DD602": Origin.SCRIPT, "DD603": Origin.SCRIPT, "DD604": Origin.SCRIPT, "DD608": Origin.SCRIPT,
    "DD609": Origin.SCRIPT, "DD611": Origin.NETWORK,
    "DD7": Origin.SCRIPT,
    "DD8": Origin.SCRIPT,
}  # fmt: skip
"""The longest beginning that matches counts. A rank that is stuck, slow, killed or missing may be so for any reason."""


def origin_of(code: str) -> Origin | None:
    """Return where the faults of a rule lie, or None if its code does not tell."""
    return next((ORIGINS[code[:length]] for length in (5, 4, 3) if code[:length] in ORIGINS), None)
