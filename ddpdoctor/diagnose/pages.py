"""The pages that document the rules. Users find them by code or kind."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.rules.registry import Rule

CLOSENESS = 0.5
"""The least similarity, on difflib's scale from 0 to 1, at which a name is suggested for an unknown one."""
LIST_HINT = "`ddpdoctor explain --list` lists them all."


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePage:
    """The page of a rule. ``text`` is the rule's docstring, in Markdown."""

    code: str
    kind: str
    severity: str
    summary: str
    text: str


def read_pages() -> tuple[RulePage, ...]:
    """Return the pages of all rules, in the order of their codes."""
    from ddpdoctor.rules.registry import all_rules

    return tuple(map(_page, all_rules()))


def read_page(name: str) -> RulePage:
    """Return the page of a rule by its code or kind. Raises ``UserError`` like ``find_page``."""
    from ddpdoctor.rules.registry import find_rule

    rule = find_rule(name)
    return find_page(name, read_pages()) if rule is None else _page(rule)


def read_titles(codes: Iterable[str]) -> dict[str, str]:
    """Return the line for lists of each of these rules, by code. An unknown code is left out."""
    from ddpdoctor.rules.registry import find_rule

    rules = {code: find_rule(code) for code in codes}
    return {code: rule.summary for code, rule in rules.items() if rule is not None}


def _page(rule: Rule) -> RulePage:
    return RulePage(code=rule.code, kind=rule.kind, severity=rule.severity.value, summary=rule.summary, text=rule.page)


def find_error(text: str) -> tuple[str, dict[str, str]] | None:
    """Return the title and the texts by label of the known error in a text, or None.

    Raises:
        UserError: it is a text, and not the name of a rule, and no known error is in it.
    """
    from ddpdoctor.model.known_errors import find_known
    from ddpdoctor.model.nccl_warnings import read_warning
    from ddpdoctor.rules.registry import find_rule

    text = text.strip()
    if find_rule(text) is not None:
        return None
    known = find_known(text)
    if known is None and (warning := read_warning(text)) is not None and warning.fix:
        return "a warning of NCCL", {"means": warning.words, "to do": warning.fix, "source": _NCCL_SOURCE}
    known = known or find_known(text, loose=True)
    if known is not None:
        return known.shown, {
            "means": known.means, "at fault": known.fault, "to do": known.fix, "source": known.source,
        }  # fmt: skip
    if " " in text or text.endswith(("Error", "Exception")):
        raise UserError(
            f"no known error is in this text: {text[:80]}",
            help="`ddpdoctor analyze FILE` reads the whole log, whatever the error is, and says which rank failed "
            "first; FILE is a log, a folder of logs, or - for standard input.",
        )
    return None


_NCCL_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"


def find_page(name: str, pages: tuple[RulePage, ...]) -> RulePage:
    """Find a page by code or kind, ignoring case. Raises ``UserError`` with near matches if there is none."""
    by_name = {key.lower(): page for page in pages for key in (page.kind, page.code)}
    page = by_name.get(name.lower())
    if page is not None:
        return page
    near = difflib.get_close_matches(name.lower(), by_name, cutoff=CLOSENESS)
    offers = ", ".join(f"{by_name[match].code} ({by_name[match].kind})" for match in near)
    hint = f"Did you mean {offers}? " if offers else ""
    raise UserError(f"there is no rule {name}", help=hint + LIST_HINT)


def check_codes(given: tuple[str, ...]) -> tuple[str, ...]:
    """Split comma-separated codes and return them in upper case. Raises ``UserError`` for an unknown code."""
    from ddpdoctor.rules.registry import find_rule

    codes = tuple(code.strip().upper() for entry in given for code in entry.split(",") if code.strip())
    for code in codes:
        rule = find_rule(code)
        if rule is None or rule.code != code:
            raise UserError(f"--ignore: there is no code {code}", help=LIST_HINT)
    return codes
