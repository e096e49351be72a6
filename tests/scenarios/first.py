"""Which scenarios the README's test command runs: at least one for each verb, launcher, way in and hook of torch.

A kind of finding is held by the tables of ``tests/rules`` and ``tests/unit``. All other scenarios are marked ``full``,
and so is each that goes by speed. ``tests/contract/test_rule_recipe.py`` holds that nothing is left out.
"""

from pathlib import Path

LISTS = Path(__file__).parents[1] / "data" / "first.txt"


def _read(section: str) -> dict[str, tuple[str, ...]]:
    """Return by file how names of scenarios begin."""
    found: dict[str, tuple[str, ...]] = {}
    for line in LISTS.read_text().partition(f"==== {section}\n")[2].partition("\n\n")[0].splitlines():
        if not line.startswith(" "):
            file = line
        found[file] = (*found.get(file, ()), *([line.strip()] if line.startswith(" ") else ()))
    return found


FIRST = _read("first")
SECOND = _read("second")
"""Of the scenarios whose runs are kept, those of which ``.ci/run`` starts the jobs too."""
NIGHT = _read("night")
"""Of the other scenarios, rare cases, those that take long, or go by the order of events of a busy machine."""
