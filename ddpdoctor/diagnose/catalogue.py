"""The rules as a reader meets them: a page each, found by code or kind."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from ddpdoctor.rules.registry import Rule

CLOSENESS = 0.5
"""How alike a name must be to be offered instead of an unknown one, on difflib's scale from 0 to 1."""
LIST_HINT = "`ddpdoctor explain --list` names them all."


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What there is to read about a rule; ``text`` is its docstring, in Markdown."""

    code: str
    kind: str
    severity: str
    summary: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPage:
    """What there is to read about a known error, label by label."""

    title: str
    told: dict[str, str]


def read_pages() -> tuple[Page, ...]:
    """Return the pages of all rules, in the order of their codes."""
    from ddpdoctor.rules.registry import all_rules

    return tuple(map(_page, all_rules()))


def read_page(name: str) -> Page:
    """Return the page of a rule by its code or kind. Raises ``UserError`` as ``find_page`` does."""
    from ddpdoctor.rules.registry import find_rule

    rule = find_rule(name)
    return find_page(name, read_pages()) if rule is None else _page(rule)


def _page(rule: Rule) -> Page:
    return Page(code=rule.code, kind=rule.kind, severity=rule.severity.value, summary=rule.summary, text=rule.page)


def find_error(text: str) -> ErrorPage | None:
    """Return what there is to read about the known error that a text is; None for one word, a code or a kind."""
    if " " not in text.strip():
        return None
    from ddpdoctor.rules.progress.known_errors import find_known

    known = find_known(text)
    if known is None:
        return None
    told = {"means": known.means, "at fault": known.fault, "to do": known.fix, "source": known.source}
    return ErrorPage(title=known.shown, told=told)


def find_page(name: str, pages: tuple[Page, ...]) -> Page:
    """Find a page by code or kind, in any case; raises ``UserError`` with near matches where there is none."""
    by_name = {key.lower(): page for page in pages for key in (page.kind, page.code)}
    page = by_name.get(name.lower())
    if page is not None:
        return page
    near = difflib.get_close_matches(name.lower(), by_name, cutoff=CLOSENESS)
    offers = ", ".join(f"{by_name[match].code} ({by_name[match].kind})" for match in near)
    hint = f"Did you mean {offers}? " if offers else ""
    raise UserError(f"there is no rule {name}", help=hint + LIST_HINT)


def check_codes(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return codes in capitals, lists with commas taken apart; raises ``UserError`` for one that no rule has."""
    from ddpdoctor.rules.registry import find_rule

    codes = tuple(code.strip().upper() for entry in given for code in entry.split(",") if code.strip())
    for code in codes:
        rule = find_rule(code)
        if rule is None or rule.code != code:
            raise UserError(f"--ignore names {code}, which is no code", help=LIST_HINT)
    return codes
