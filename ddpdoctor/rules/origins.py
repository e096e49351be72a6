"""Where the faults lie that a rule finds, by the beginning of its code."""

from __future__ import annotations

from ddpdoctor.model.findings import FaultOrigin

ORIGINS = {
    "DD1": FaultOrigin.SETTINGS,
    "DD20": FaultOrigin.NETWORK, "DD21": FaultOrigin.NETWORK, "DD22": FaultOrigin.NETWORK, "DD23": FaultOrigin.SETTINGS,
    "DD30": FaultOrigin.MACHINE, "DD31": FaultOrigin.MACHINE, "DD32": FaultOrigin.MACHINE, "DD33": FaultOrigin.NETWORK,
    "DD305": FaultOrigin.SETTINGS, "DD306": FaultOrigin.SETTINGS,
    "DD401": FaultOrigin.MACHINE, "DD402": FaultOrigin.MACHINE, "DD403": FaultOrigin.NETWORK,
    "DD404": FaultOrigin.MACHINE, "DD405": FaultOrigin.NETWORK,
    "DD5": FaultOrigin.SCRIPT,
    "DD602": FaultOrigin.SCRIPT, "DD603": FaultOrigin.SCRIPT, "DD604": FaultOrigin.SCRIPT, "DD608": FaultOrigin.SCRIPT,
    "DD609": FaultOrigin.SCRIPT, "DD611": FaultOrigin.NETWORK,
    "DD7": FaultOrigin.SCRIPT,
    "DD8": FaultOrigin.SCRIPT,
}  # fmt: skip
"""The longest beginning that matches counts. A rank that is stuck, slow, killed or missing may be so for any reason."""


def origin_of(code: str) -> FaultOrigin | None:
    """Return where the faults of a rule lie, or None if its code does not tell."""
    return next((ORIGINS[code[:length]] for length in (5, 4, 3) if code[:length] in ORIGINS), None)
