"""Pages of rules, found by code or kind."""

import pytest

from ddpdoctor.cli.explain import render_list, render_page
from ddpdoctor.diagnose.pages import RulePage, check_codes, find_page
from ddpdoctor.model.errors import UserError

STUCK = RulePage(
    code="DD601", kind="stuck", severity="error", summary="A rank is stuck.", text="A rank waits.\n\n# Why\n"
)
EXIT = RulePage(code="DD609", kind="exit-hang", severity="error", summary="It does not end.", text="Threads [/x].")
NOTE = RulePage(code="DD901", kind="not-recorded", severity="info", summary="No ring.", text="Full disk.")
PAGES = (STUCK, EXIT, NOTE)


@pytest.mark.parametrize("name", ["DD601", "dd601", "stuck", "Stuck"])
def test_a_page_is_found_in_any_case(name):
    assert find_page(name, PAGES) is STUCK


@pytest.mark.parametrize(
    ("name", "offer"), [("DD60", "DD601 (stuck)"), ("exithang", "DD609 (exit-hang)"), ("stack", "DD601")]
)
def test_an_unknown_name_offers_what_is_near(name, offer):
    with pytest.raises(UserError, match=f"no rule {name}") as error:
        find_page(name, PAGES)
    assert offer in error.value.help


def test_a_name_like_none_offers_nothing_but_the_list():
    with pytest.raises(UserError) as error:
        find_page("qqqqqqq", PAGES)
    assert error.value.help.startswith("`ddpdoctor explain --list`")


def test_codes_to_ignore_may_come_in_one_word_and_in_any_case():
    assert check_codes(("dd601, DD901", "DD609", "")) == ("DD601", "DD901", "DD609")


@pytest.mark.parametrize("code", ["DD999", "stuck"])
def test_only_codes_can_be_ignored(code):
    with pytest.raises(UserError, match=code.upper()):
        check_codes((code,))


def test_the_list_is_a_table():
    assert render_list(PAGES).splitlines() == [
        "DD601  stuck         error    A rank is stuck.",
        "DD609  exit-hang     error    It does not end.",
        "DD901  not-recorded  info     No ring.",
    ]


def test_a_page_is_printed_as_it_is():
    assert render_page(EXIT) == "DD609 exit-hang (error)\n=======================\n\nThreads [/x].\n"
