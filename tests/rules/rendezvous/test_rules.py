"""What `check-rendezvous` says of what nodes saw of each other."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.rendezvous import judge_meeting
from ddpdoctor.model.findings import Confidence, Judgment, Outcome, Severity
from ddpdoctor.model.reaching import Contact, StartTrial
from ddpdoctor.rules.rendezvous.mesh import PairSide, explain, say_duration
from tests.rules.rendezvous.build import (
    LARGE,
    absent,
    attempt,
    column,
    error,
    healthy,
    pair,
    row,
    transfer,
    view,
    visit,
    with_firewall,
    with_pairs,
    with_visits,
)

EVERYBODY = tuple(f"node{number}" for number in range(4))
TWO = healthy(2)
FOUR = healthy()


def fails(contact):
    return lambda source, target: pair(source, target, contact)


def large(**more):
    return lambda source, target: pair(source, target, large=transfer(LARGE, **more))


STALLS = large(contact=Contact.NO_ANSWER, sent=18, retransmitted=8, delivered=0)
LOSES = large(duration_s=1.2, sent=3600, retransmitted=720)
STALLS_BY_LOSS = large(contact=Contact.NO_ANSWER, sent=900, retransmitted=190)
CRAWLS = large(duration_s=0.35)
FAILED_START = tuple(
    StartTrial(node=number, ok=False, stage="all_reduce", error="Timed out waiting 5000ms", duration_s=5.0)
    for number in range(4)
)


def lone(contact):
    """Return what node 1 of 2 saw alone."""
    return replace(
        TWO, visits=(absent(0), visit(1, store_view=view(1, contact))), complete=False, pairs=(), trials=(),
        fleet=replace(TWO.fleet, nodes=TWO.fleet.nodes[1:]),
    )  # fmt: skip


def two_addresses(number, first, second):
    """Return what a node saw of a store whose name has two addresses."""
    return replace(view(number), attempts=(attempt(first, 77), attempt(second)))


TABLE = {
    "all is well": (FOUR, []),
    "two nodes, all is well": (TWO, []),
    "one node": (healthy(1), []),
    "the store is refused to one of two": (
        with_visits(TWO, n1=view(1, Contact.REFUSED)), [("tcp-store", ("node0",), "check what node0 accepts")]
    ),
    "the store is dropped for all others": (
        with_visits(FOUR, **{f"n{n}": view(n, Contact.NO_ANSWER) for n in (1, 2, 3)}),
        [("tcp-store", ("node0",), "gets no response")],
    ),
    "the store is prohibited to one of four": (
        with_visits(FOUR, n2=view(2, Contact.UNREACHABLE)),
        [("tcp-store", ("node2",), "check what leaves node2, and what node0 accepts")],
    ),
    "an address that torch tries first does not answer, on all nodes": (
        with_visits(FOUR, **{f"n{n}": two_addresses(n, Contact.NO_ANSWER, Contact.CONNECTED) for n in range(4)}),
        [("tcp-store", ("node0",), "node0 first resolves to an address that does not respond")],
    ),
    "an address that one node alone tries first does not answer": (
        with_visits(FOUR, n2=two_addresses(2, Contact.NO_ANSWER, Contact.CONNECTED)),
        [("tcp-store", ("node2",), "torch waits there")],
    ),
    "an address that torch does not come to": (
        with_visits(TWO, n1=two_addresses(1, Contact.CONNECTED, Contact.NO_ANSWER)), []
    ),
    "an address that refuses at once": (
        with_visits(TWO, n1=two_addresses(1, Contact.REFUSED, Contact.CONNECTED)), []
    ),
    "what answers is no store": (
        with_visits(TWO, n0=view(0, Contact.NO_STORE, "Address already in use"), n1=view(1, Contact.NO_STORE)),
        [("tcp-store", ("node0",), "cannot serve the store on port 29500"),
         ("tcp-store", ("node0",), "is not a torch store")],
    ),
    "nobody listens, as a node alone sees it": (
        lone(Contact.REFUSED), [("tcp-store", ("node0",), "no process listens there, or a firewall")]
    ),
    "no answer, as a node alone sees it": (lone(Contact.NO_ANSWER), [("tcp-store", ("node0",), "gets no response")]),
    "no name, as a node alone sees it": (
        lone(Contact.UNRESOLVED), [("tcp-store", ("node1",), "does not resolve")]
    ),
    "a column": (with_pairs(FOUR, column(2), fails(Contact.NO_ANSWER)), [("mesh", ("node2",), "(inbound)")]),
    "a row": (with_pairs(FOUR, row(2), fails(Contact.NO_ANSWER)), [("mesh", ("node2",), "(outbound)")]),
    "a host that is cut off": (
        with_pairs(FOUR, row(2) | column(2), fails(Contact.UNREACHABLE)), [("mesh", ("node2",), "cut off")]
    ),
    "one pair": (with_pairs(FOUR, {(1, 2)}, fails(Contact.REFUSED)),
        [("mesh", ("node1", "node2"), "both can connect to")]),
    "two hosts, one way": (
        with_pairs(TWO, {(0, 1)}, fails(Contact.NO_ANSWER)), [("mesh", ("node1",), "the other direction works")]
    ),
    "two hosts, both ways": (
        with_pairs(TWO, {(0, 1), (1, 0)}, fails(Contact.NO_ANSWER)), [("mesh", ("node0", "node1"), "any direction")]
    ),
    "the first bytes are lost": (
        with_pairs(FOUR, column(2), lambda s, t: pair(s, t, small=transfer(64, contact=Contact.RESET), large=None)),
        [("mesh", ("node2",), "the first bytes are lost")],
    ),
    "a black hole on the way to a host": (with_pairs(FOUR, column(2), STALLS), [("mtu", ("node2",), "inbound")]),
    "a black hole between two hosts": (with_pairs(TWO, {(0, 1)}, STALLS), [("mtu", ("node1",), "from node0 to node1")]),
    "a black hole, of which the kernel counts bytes": (
        with_pairs(FOUR, column(2), large(contact=Contact.NO_ANSWER, sent=40, retransmitted=4, delivered=0)),
        [("mtu", ("node2",), "inbound")],
    ),
    "loss by which even the first packets stall": (
        with_pairs(FOUR, column(1), large(contact=Contact.NO_ANSWER, sent=16, retransmitted=6, delivered=2896)),
        [("packet-loss", ("node1",), "38 %")],
    ),
    "a large payload that is cut off is no black hole": (
        with_pairs(FOUR, column(1), large(contact=Contact.RESET, sent=16, delivered=0)), []
    ),
    "loss on the way from a host": (with_pairs(FOUR, row(1), LOSES), [("packet-loss", ("node1",), "20 %")]),
    "loss by which a payload stalls": (
        with_pairs(FOUR, column(1), STALLS_BY_LOSS), [("packet-loss", ("node1",), "21 %")]
    ),
    "a black hole, by what the target acknowledged": (
        with_pairs(FOUR, column(1), large(contact=Contact.NO_ANSWER, sent=90, retransmitted=45, delivered=0)),
        [("mtu", ("node1",), "inbound")],
    ),
    "loss that lets hardly anything through": (
        with_pairs(FOUR, column(1), large(contact=Contact.NO_ANSWER, sent=18, retransmitted=9, delivered=2896)),
        [("packet-loss", ("node1",), "50 %")],
    ),
    "what had arrived is sent again, since its acknowledgements are lost": (
        with_pairs(FOUR, column(1), large(retransmitted=40, sent=2900, needless=31)), []
    ),
    "loss, and a few acknowledgements too": (
        with_pairs(FOUR, column(1), large(retransmitted=400, sent=2900, needless=80)),
        [("packet-loss", ("node1",), "14 %")],
    ),
    "a few segments sent again": (with_pairs(FOUR, column(1), large(retransmitted=2, sent=2900)), []),
    "a slow card": (with_pairs(FOUR, row(1), CRAWLS), [("slow-link", ("node1",), "(outbound): 12.0 MB/s")]),
    "a slow pair": (with_pairs(FOUR, {(1, 2), (2, 1)}, CRAWLS), [("slow-link", ("node1", "node2"), "and back")]),
    "a slow host of three": (
        with_pairs(healthy(3), row(2, 3) | column(2, 3), CRAWLS), [("slow-link", ("node2",), "to and from node2")]
    ),
    "what comes in to a slow host waits behind what goes out of it": (
        with_pairs(healthy(3), row(2, 3) | {(0, 2)}, CRAWLS), [("slow-link", ("node2",), "(outbound): 12.0 MB/s")]
    ),
    "two slow hosts of four": (
        with_pairs(FOUR, row(0) | column(0) | row(3) | column(3), CRAWLS),
        [("slow-link", (name,), f"to and from {name}") for name in ("node0", "node3")],
    ),
    "so slow that it was given up": (
        with_pairs(FOUR, row(1), large(contact=Contact.NO_ANSWER, duration_s=12.5, sent=70, delivered=60_000)),
        [("slow-link", ("node1",), "(outbound): 4.8 kB/s")],
    ),
    "what broke off tells no speed": (
        with_pairs(FOUR, row(1), large(contact=Contact.RESET, duration_s=0.4, sent=70, delivered=60_000)), []
    ),
    "slow by half": (with_pairs(FOUR, row(1), large(duration_s=0.008)), []),
    "slow by a moment on a busy host": (with_pairs(FOUR, {(0, 1)}, large(duration_s=0.13)), []),
    "all are as slow": (with_pairs(FOUR, {(p.source, p.target) for p in FOUR.pairs}, CRAWLS), []),
    "a start that fails for no reason": (
        replace(FOUR, trials=FAILED_START), [("start-trial", EVERYBODY, "all hosts: the first all_reduce")]
    ),
    "a start that fails behind a firewall": (
        replace(with_pairs(FOUR, column(2), fails(Contact.NO_ANSWER)), trials=FAILED_START),
        [("mesh", ("node2",), "(inbound)")],
    ),
    "a start that fails through a black hole": (
        replace(with_pairs(FOUR, column(2), STALLS), trials=FAILED_START), [("mtu", ("node2",), "inbound")]
    ),
}  # fmt: skip


def judge_rendezvous(facts, found=()):
    before = Judgment(findings=tuple(found), checks=(), certain=False)
    findings, checks = judge_meeting(facts, before)
    return list(findings[len(before.findings) :]), checks


@pytest.mark.parametrize("name", TABLE)
def test_findings(name):
    facts, wanted = TABLE[name]
    findings, checks = judge_rendezvous(facts)
    assert [(one.kind, one.hosts) for one in findings] == [(kind, hosts) for kind, hosts, _ in wanted]
    for one, (_, _, words) in zip(findings, wanted, strict=True):
        assert words in one.summary
        assert one.fix
        assert one.evidence
    assert Outcome.CRASHED not in {check.outcome for check in checks}


EFFECTS = {
    "a name that does not resolve": (
        with_visits(TWO, n1=view(1, Contact.UNRESOLVED)), error("master-resolve", "node1"), "DD219"
    ),
    "a number for a name": (with_visits(TWO, n1=view(1, Contact.NO_ANSWER)), error("master-numeric", "node1"), "DD219"),
    "nobody hosts the endpoint": (
        with_visits(TWO, n0=view(0, Contact.REFUSED, serves=False), n1=view(1, Contact.REFUSED)),
        error("rdzv-host"), "DD219",
    ),
    "a port that is taken": (
        with_visits(TWO, n0=view(0, Contact.CONNECTED, "Address already in use")), error("port-free", "node0"), "DD219"
    ),
    "the host of the store did not come": (
        replace(
            with_visits(FOUR, n1=view(1, Contact.REFUSED), n2=view(2, Contact.REFUSED), n3=view(3, Contact.REFUSED)),
            visits=(absent(0), *(visit(n, store_view=view(n, Contact.REFUSED)) for n in (1, 2, 3))),
        ),
        error("rank-set"), "DD219",
    ),
    "a host name that means loopback": (
        with_pairs(TWO, {(0, 1)}, lambda s, t: pair(s, t, Contact.REFUSED, address="127.0.1.1")),
        error("hostname-loopback", "node1"), "DD220",
    ),
    "an interface that is no interface": (
        with_pairs(TWO, {(0, 1)}, fails(Contact.NO_ANSWER)), error("ifname-exists", "node1"), "DD220"
    ),
    "a start that cannot work": (replace(FOUR, trials=FAILED_START), error("ws-same"), "DD221"),
}  # fmt: skip


@pytest.mark.parametrize("name", EFFECTS)
def test_what_follows_from_another_error_is_not_found_again(name):
    facts, cause, code = EFFECTS[name]
    findings, checks = judge_rendezvous(facts, [cause])
    assert findings == []
    (check,) = [one for one in checks if one.code == code]
    assert check.outcome in {Outcome.SKIPPED, Outcome.PASSED}


def test_an_error_of_another_host_explains_nothing():
    findings, _ = judge_rendezvous(with_visits(TWO, n1=view(1, Contact.REFUSED)), [error("master-resolve", "node0")])
    assert [one.kind for one in findings] == ["tcp-store"]


def test_a_program_on_the_port_is_described_beside_the_port_that_is_taken():
    facts = with_visits(TWO, n0=view(0, Contact.NO_STORE, "Address already in use"), n1=view(1, Contact.NO_STORE))
    findings, _ = judge_rendezvous(facts, [error("port-free", "node0")])
    assert [one.kind for one in findings] == ["tcp-store"] * 2


def test_between_two_hosts_the_packet_filter_decides_how_sure_it_is():
    facts = with_pairs(TWO, {(0, 1)}, fails(Contact.NO_ANSWER))
    (guessed,), _ = judge_rendezvous(facts)
    (seen,), _ = judge_rendezvous(with_firewall(facts, 1))
    assert (guessed.confidence, seen.confidence) == (Confidence.MEDIUM, Confidence.HIGH)
    assert "node1: nft inet filter input: policy drop" in seen.evidence


def test_the_line_to_paste_opens_the_ports_for_the_network_of_the_nodes():
    facts = with_pairs(FOUR, column(2), fails(Contact.NO_ANSWER))
    (plain,), _ = judge_rendezvous(facts)
    (nft,), _ = judge_rendezvous(with_firewall(facts, 2))
    assert plain.fix.startswith(
        "iptables -I INPUT -p tcp -s 10.0.0.0/24 --dport 32768:60999 -j ACCEPT (as root on node2)"
    )
    assert nft.fix.startswith("nft insert rule inet filter input ip saddr 10.0.0.0/24 accept (as root on node2)")
    (store,), _ = judge_rendezvous(with_visits(TWO, n1=view(1, Contact.NO_ANSWER)))
    assert store.fix.startswith("iptables -I INPUT -p tcp -s 10.0.0.0/24 --dport 29500 -j ACCEPT (as root on node0)")


def test_a_node_alone_says_what_it_saw_of_the_others():
    seen = lone(Contact.REFUSED)
    here = replace(seen.visits[1], way_lost="by own port: it answers, and does not hold the same token")
    (finding,), _ = judge_rendezvous(replace(seen, visits=(seen.visits[0], here)))
    assert finding.evidence[-1] == f"node1 looked for them {here.way_lost}"


def test_severities():
    (hole,), _ = judge_rendezvous(with_pairs(FOUR, column(2), STALLS))
    (loss,), _ = judge_rendezvous(with_pairs(FOUR, row(1), LOSES))
    assert (hole.severity, loss.severity) == (Severity.ERROR, Severity.WARNING)


def test_what_was_not_looked_at_is_skipped_or_cannot_be_determined():
    bare = replace(FOUR, visits=tuple(replace(one, store_view=None) for one in FOUR.visits), pairs=(), trials=())
    _, checks = judge_rendezvous(bare)
    assert {check.outcome for check in checks} == {Outcome.SKIPPED}
    unknown = with_pairs(
        FOUR, {(p.source, p.target) for p in FOUR.pairs},
        lambda s, t: pair(s, t, large=replace(transfer(LARGE), sent=None, retransmitted=None)),
    )  # fmt: skip
    _, checks = judge_rendezvous(unknown)
    assert [c.outcome for c in checks if c.code == "DD222"] == [Outcome.INCONCLUSIVE]


def test_a_node_that_lost_the_others_cannot_tell_of_the_pairs():
    """It saw nothing wrong itself, and does not end as if all were well."""
    findings, checks = judge_rendezvous(lone(Contact.CONNECTED))
    assert findings == []
    assert [check.outcome for check in checks if check.code == "DD220"] == [Outcome.INCONCLUSIVE]


def test_outcomes_say_what_was_seen():
    _, checks = judge_rendezvous(with_pairs(FOUR, column(2), fails(Contact.NO_ANSWER)))
    assert [(check.id, check.code, check.group, check.seen) for check in checks] == [
        ("tcp-store", "DD219", "network", "4 of 4 nodes reach node0:29500"),
        ("mesh", "DD220", "network", "9 of 12 ordered pairs connect"),
        ("start-trial", "DD221", "network", "4 of 4 nodes started and reduced a tensor"),
        ("packet-loss", "DD222", "network", "9 of 9 large payloads arrived"),
    ]


def test_pairs_that_were_not_tried_say_why():
    facts = replace(TWO, pairs=tuple(replace(p, connecting=None, small=None, large=None, skipped="node1 publishes no "
                                             "address") for p in TWO.pairs))  # fmt: skip
    _, checks = judge_rendezvous(facts)
    assert next(c.reason for c in checks if c.code == "DD220") == "node1 publishes no address"


def test_so_many_pairs_are_judged_in_no_time():
    facts = with_pairs(healthy(64), row(5, 64), CRAWLS)
    (found,), _ = judge_rendezvous(facts)
    assert (found.kind, found.hosts) == ("slow-link", ("node5",))


# Which nodes explain the pairs that do not work.


def grid(count, bad, untried=()):
    pairs = [(s, t) for s in range(count) for t in range(count) if s != t and (s, t) not in untried]
    return {pair: pair in bad for pair in pairs}


TABLE_LINES = {
    "nothing is bad": (grid(4, ()), []),
    "nothing was tried": ({}, []),
    "a column": (grid(4, column(2)), [(PairSide.INBOUND, (2,))]),
    "a row": (grid(4, row(2)), [(PairSide.OUTBOUND, (2,))]),
    "a cross": (grid(4, column(2) | row(2)), [(PairSide.CUT_OFF, (2,))]),
    "two columns, which make a row look bad": (
        grid(3, column(1, 3) | column(2, 3)), [(PairSide.INBOUND, (1,)), (PairSide.INBOUND, (2,))]
    ),
    "one pair, one way": (grid(4, {(0, 1)}), [(PairSide.PAIR, (0, 1))]),
    "one pair, both ways": (grid(4, {(0, 1), (1, 0)}), [(PairSide.PAIR, (0, 1))]),
    "a column and a pair elsewhere": (
        grid(5, column(2, 5) | {(0, 1)}), [(PairSide.INBOUND, (2,)), (PairSide.PAIR, (0, 1))]
    ),
    "all of them": (grid(3, grid(3, ())), [(PairSide.ALL, (0, 1, 2))]),
    "two nodes, one way": (grid(2, {(0, 1)}), [(PairSide.INBOUND, (1,))]),
    "two nodes, both ways": (grid(2, {(0, 1), (1, 0)}), [(PairSide.ALL, (0, 1))]),
    "a column of which one pair was not tried": (grid(4, column(2) - {(0, 2)}, {(0, 2)}), [(PairSide.INBOUND, (2,))]),
    "the only pair that was tried": ({(0, 1): True}, [(PairSide.INBOUND, (1,))]),
    "one pair tried of a node among many": (grid(4, {(0, 2)}, {(1, 2), (3, 2)}), [(PairSide.PAIR, (0, 2))]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_LINES)
def test_who_explains_it(name):
    tried, wanted = TABLE_LINES[name]
    found = explain(tried)
    assert [(blame.way, blame.nodes) for blame in found] == wanted
    assert {pair for blame in found for pair in blame.pairs} == {pair for pair, bad in tried.items() if bad}


def test_a_single_pair_leaves_both_ends_open():
    assert [blame.alone for blame in explain(grid(2, {(0, 1)}))] == [True]
    assert [blame.alone for blame in explain(grid(3, column(1, 3)))] == [False]


def test_many_nodes_take_no_time():
    (blame,) = explain(grid(300, column(7, 300)))
    assert (blame.way, blame.nodes, len(blame.pairs)) == (PairSide.INBOUND, (7,), 299)


@pytest.mark.parametrize(
    ("duration_s", "words"), [(0.0003, "0.3 ms"), (0.01, "10 ms"), (0.9994, "999 ms"), (1.0, "1.0 s"), (12.5, "12.5 s")]
)
def test_durations_have_the_unit_that_is_read_best(duration_s, words):
    assert say_duration(duration_s) == words


@pytest.mark.parametrize(("interface", "named"), [("ib0", "ib0"), ("", "eth0")])
@pytest.mark.parametrize("make", [STALLS, LOSES, CRAWLS])
def test_commands_name_the_interface_of_the_pair(make, interface, named):
    seen = with_pairs(FOUR, row(1), lambda source, target: replace(make(source, target), interface=interface))
    (finding, *_), _ = judge_rendezvous(seen)
    assert f" {named} " in finding.fix
