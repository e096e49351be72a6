"""Makes quotes from evidence: one short line without secrets."""

from __future__ import annotations

from ddpdoctor.recorder.storage.secrets import hide_in_text

MOST_QUOTED = 240
"""Our choice: this many characters are enough to understand any line."""


def quote(text: str) -> str:
    """Return the beginning of a text in one line, without what looks like a credential."""
    short = " ".join(text[: 2 * MOST_QUOTED].split())
    shown = hide_in_text(short)
    return shown if len(shown) <= MOST_QUOTED else shown[: MOST_QUOTED - 1] + "…"
