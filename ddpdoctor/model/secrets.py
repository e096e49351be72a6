"""Takes secrets out of what is stored: a run folder is passed on to colleagues and into issues."""

from __future__ import annotations

import re
from itertools import pairwise

SECRET_WORDS = frozenset({"token", "password", "passwd", "secret", "apikey", "credential", "credentials"})
HIDDEN = "***"


def hide_secrets(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command line without the values of options that look like secrets."""
    shown: list[str] = []
    hide_next = False
    for word in command:
        name, sep, _ = word.partition("=")
        secret = _names_secret(name)
        if hide_next:
            shown.append(HIDDEN)
        elif secret and sep:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(word)
        hide_next = secret and not sep and word.startswith("-") and not hide_next
    return tuple(shown)


def _names_secret(option: str) -> bool:
    """Return whether an option names a secret by one of its words: ``--hf-token`` does, ``--tokenizer`` does not."""
    words = re.split(r"[^a-z0-9]+", option.lower())
    return bool(SECRET_WORDS.intersection(words)) or ("api", "key") in pairwise(words)
