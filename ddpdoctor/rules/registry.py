"""The rules by code and kind. A rule is a function; its docstring is the page that ``explain`` shows."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.node import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.findings import Severity
    from ddpdoctor.rules.answers import Answer

    Check = Callable[[Any], Answer]

PACKAGE = "ddpdoctor.rules"
PAGES = Path(__file__).parent / "pages"
LOOKED_UP_MOST = "progress"
# What a rule can be asked about: the type of its argument. docs/design/0018 lists the families.
SUBJECTS = frozenset({
    "Node", "Fleet", "Meeting", "Measured", "JobState", "Job", "Replicas", "Shares", "Trial", "DiffFacts",
    "Checkpoints", "RunState", "SpeedState", "TuneResult",
})  # fmt: skip


class CheckGroup(str, Enum):
    """The groups, in the order in which `check-env` shows its checks."""

    VERSIONS = "versions"
    VARIABLES = "variables"
    LIMITS = "limits"
    NETWORK = "network"
    GPUS = "GPUs"
    LINKS = "links"
    LAUNCH = "launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A possible problem: its code, kind and severity, and the functions that detect it."""

    code: str
    kind: str
    severity: Severity
    summary: str
    begins: str  # the first sentence of its page, which is the docstring of its function
    checks: dict[str, Check]  # the functions that look for it, by the type of facts that each one takes
    family: str  # the package of its module, below ``rules``
    group: str  # the heading under which its check is shown
    needs: tuple[str, ...] = ()  # The sections of a node that it looks at. If it alone is chosen, no others are read.
    reads: str = ""  # for the user: the files, calls and variables that it looks at
    # Kinds of the rules whose findings come before its own, because they explain it or happen earlier in a job.
    after: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """The page that `explain` and the documentation show: the first sentence, then this code's file in ``pages``.

        Raises:
            OSError: the file does not exist.
        """
        return f"{self.begins}\n\n{(PAGES / f'{self.code}.md').read_text(encoding='utf-8')}".strip()


_rules: dict[str, Rule] = {}
_checks: dict[str, dict[str, Check]] = {}
_loaded: set[str] = set()


def rule(  # noqa: PLR0913 - all properties of a rule, each under its name
    code: str,
    kind: str,
    severity: Severity,
    summary: str,
    *,
    after: tuple[str, ...] = (),
    group: CheckGroup | None = None,
    needs: tuple[str, ...] = (),
    reads: str = "",
) -> Callable[[Check], Check]:
    """Register the decorated function as a rule about facts of its argument's type.

    ``group``, ``needs`` and ``reads`` are for rules of `check-env`. Raise ValueError if the code or kind is taken, the
    docstring is missing, a section of ``needs`` does not exist, or no command has facts for the argument's type.
    """

    def register(check: Check) -> Check:
        if code in _rules:
            raise ValueError(f"code {code} is taken by the rule {_rules[code].kind}")
        for known in _rules.values():
            if known.kind == kind:
                raise ValueError(f"kind {kind} is taken by the rule {known.code}")
        about = _subject_of(check)
        begins = inspect.cleandoc(check.__doc__ or "")
        if not begins:
            raise ValueError(f"rule {code} has no docstring, which begins its page")
        for section in needs:
            if section not in SECTIONS:
                raise ValueError(f"a node has no section {section}")
        family = check.__module__.removeprefix(f"{PACKAGE}.").partition(".")[0]
        checks = _checks.setdefault(code, {})
        checks[about] = check
        _rules[code] = Rule(
            code=code, kind=kind, severity=severity, summary=summary, begins=begins, checks=checks, family=family,
            group=group.value if group is not None else family, needs=needs, reads=reads, after=after,
        )  # fmt: skip
        return check

    return register


def also(code: str) -> Callable[[Check], Check]:
    """Register the decorated function as another check for the problem of the rule ``code``, on other facts."""

    def register(check: Check) -> Check:
        _checks.setdefault(code, {})[_subject_of(check)] = check
        return check

    return register


def _subject_of(check: Check) -> str:
    annotation = next(iter(check.__annotations__.values()), "")
    name = annotation if isinstance(annotation, str) else annotation.__name__
    if name not in SUBJECTS:
        raise ValueError(f"{check.__name__} judges a {name or 'value without a type'}, but no verb has such facts")
    return name


def rules_of(*families: str) -> tuple[Rule, ...]:
    """Return the rules of some families (packages below ``rules``), sorted by code."""
    for family in families:
        if family not in _loaded:
            package = importlib.import_module(f"{PACKAGE}.{family}")
            for module in pkgutil.iter_modules(package.__path__):  # each may register rules
                importlib.import_module(f"{package.__name__}.{module.name}")
            _loaded.add(family)
    return tuple(_rules[code] for code in sorted(_rules) if _rules[code].family in families)


def all_rules() -> tuple[Rule, ...]:
    """Return every rule of every family, sorted by code."""
    return rules_of(*_families())


def _families() -> tuple[str, ...]:
    """Return the packages below ``rules``; the one whose rules are looked up most often comes first."""
    rules = importlib.import_module(PACKAGE)
    names = [module.name for module in pkgutil.iter_modules(rules.__path__) if module.ispkg]
    return tuple(sorted(names, key=lambda name: (name != LOOKED_UP_MOST, name)))


def loaded_rules() -> tuple[Rule, ...]:
    """Return the rules of the families loaded so far."""
    return tuple(_rules.values())


def find_rule(code_or_kind: str) -> Rule | None:
    """Return the rule with this code (in any case) or kind, or None. It loads only as many families as needed."""
    wanted = code_or_kind.strip().lower()
    for family in (None, *_families()):
        for known in loaded_rules() if family is None else rules_of(family):
            if wanted in (known.code.lower(), known.kind):
                return known
    return None
