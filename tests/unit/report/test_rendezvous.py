"""The report of check-rendezvous as text: who came, the store, and the matrix."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.rendezvous.judging import rendezvous_data
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Report
from ddpdoctor.model.reaching import Contact
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.text.report import render_text
from tests.rules.rendezvous.build import LARGE, absent, column, healthy, pair, transfer, view, with_pairs, with_visits


def report(seen, **more):
    return Report(
        command=("ddpdoctor", "check-rendezvous"), started_at="2026-01-02T03:04:05.000+00:00",
        ended_at="2026-01-02T03:04:07.500+00:00", job=None, verdict=None, findings=(), checks=(), ranks=(),
        data={**rendezvous_data(seen), **more}, tool_version="1.2.3",
    )  # fmt: skip


def lines(one):
    """What stands below the status."""
    text = render_text(one, width=None, color=False, run_dir=None)
    return text.splitlines()[3:]


def test_nodes_that_are_well_take_a_line_each_and_one_for_all_pairs():
    assert lines(report(healthy(2))) == [
        "  node  host   publishes         store at node0:29500",
        "  0     node0  10.0.0.10 (eth0)  serves it",
        "  1     node1  10.0.0.11 (eth0)  reached in 0.3 ms",
        "",
        "all 2 ordered pairs of nodes connect, and large payloads arrive at 1049 to 1049 MB/s",
    ]


def test_an_address_of_ipv6_stands_in_brackets_before_its_port():
    one = healthy(1)
    visits = (replace(one.visits[0], store_view=replace(one.visits[0].store_view, host="fd00:77::a")),)
    assert lines(report(replace(one, visits=visits)))[0].endswith("store at [fd00:77::a]:29500")


def test_the_matrix_shows_which_pairs_fail_and_how():
    facts = with_pairs(healthy(3), column(1, 3), lambda s, t: pair(s, t, Contact.NO_ANSWER))
    facts = with_pairs(facts, {(2, 0)}, lambda s, t: pair(s, t, large=transfer(LARGE, contact=Contact.NO_ANSWER)))
    assert lines(report(facts))[-6:] == [
        "connections, from the node of the row to that of the column:",
        "         0     1   2",
        "  0      .  drop  ok",
        "  1     ok     .  ok",
        "  2  stall  drop   .",
        "drop: nothing came back; stall: it connects, but a payload does not arrive",
    ]


def test_nodes_that_did_not_come_and_stores_that_were_not_reached():
    facts = with_visits(healthy(3), n0=view(0, not_served="Address already in use"), n1=view(1, Contact.REFUSED))
    facts = replace(facts, visits=(*facts.visits[:2], absent(2)), pairs=(), trust="the token of DDPDOCTOR_TOKEN")
    assert lines(report(facts))[1:] == [
        "  0     node0  10.0.0.10 (eth0)  cannot serve it: Address already in use",
        "  1     node1  10.0.0.11 (eth0)  refused: Connection refused",
        "  2     ?      -                 did not come",
        "",
        "trusted: the token of DDPDOCTOR_TOKEN",
    ]


def test_of_many_nodes_one_line_stands_for_the_matrix():
    facts = with_pairs(healthy(9), column(1, 9), lambda s, t: pair(s, t, Contact.REFUSED))
    assert lines(report(facts))[-1] == "8 of 72 ordered pairs of nodes do not work"


def test_eight_nodes_fit_into_80_columns_and_into_markdown():
    facts = with_pairs(healthy(8), column(1, 8), lambda s, t: pair(s, t, Contact.UNREACHABLE))
    text = render_text(report(facts), width=80, color=False, verbose=False, run_dir=None, cwd=None)
    assert "  7  ok  unreach  ok" in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("ddpdoctor: no problem found\n  8 hosts; ")
    assert "connections, from the node of the row" in render_markdown(report(facts))


def test_a_node_that_did_not_judge_has_no_table():
    one = report(healthy(2), rendezvous=None)
    text = render_text(one, width=None, color=False, run_dir=None)
    assert text.startswith("ddpdoctor: no problem found\n  2 hosts; ")


def test_a_damaged_file_is_said_to_be_one():
    with pytest.raises(UserError, match="cannot be read"):
        lines(report(healthy(2), rendezvous={"nnodes": "two", "visits": []}))
