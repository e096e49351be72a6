import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.node import ConfFile
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, node, process
from tests.rules.environment.network import LO, interface, names, network

ETH0 = interface("eth0", "10.0.0.4/24")
ETH1 = interface("eth1", "10.1.0.4/24")
DOCKER0 = interface("docker0", "172.17.0.1/16", virtual=True)
NO_SYSFS = Unread(why=Why.ABSENT, reason="there is no /sys/class/net")


def machine(*interfaces, own=("10.0.0.4",), conf=(), default="eth0", **variables):
    return node(
        names=names(*own),
        network=network(*interfaces, default=default),
        conf_files=conf,
        processes=(process(**variables),),
    )


def conf_file(**variables):
    return ConfFile(
        path="/etc/nccl.conf", variables=variables, hidden_by_env=(), hidden_by_file=(), bad_lines=()
    )  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_SOCKET_IFNAME": "eth0"},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"NCCL_SOCKET_IFNAME": "ib,eth"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"NCCL_SOCKET_IFNAME": "^=docker0,lo"},
        {"NCCL_SOCKET_IFNAME": "eth0:1"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"GLOO_SOCKET_IFNAME": "eth0,docker0"},
        {"GLOO_SOCKET_IFNAME": "eth0,"},
        {"TP_SOCKET_IFNAME": "eth0"},
    ],
)
def test_names_that_are_there(variables):
    check, findings = ask("ifname-exists", machine(ETH0, DOCKER0, **variables))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    ((name, value),) = variables.items()
    assert check.seen == f"{name}={value}; there are lo, eth0, docker0"


@pytest.mark.parametrize(
    ("variables", "words", "fix"),
    [
        ({"NCCL_SOCKET_IFNAME": "eno1"}, "no interface has such a name", "export NCCL_SOCKET_IFNAME=eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "no interface has such a name", "export NCCL_SOCKET_IFNAME=eth0"),
        ({"NCCL_SOCKET_IFNAME": "^e,lo,docker"}, "excludes every interface", "export NCCL_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "^docker"}, "^ is NCCL syntax", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "=eth0"}, "= is NCCL syntax", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "eth is only a prefix of eth0", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0, docker0"}, "reads the space as part", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0,,docker0"}, "an empty name", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "eno1"}, "there is no interface eno1", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"TP_SOCKET_IFNAME": "eth0,docker0"}, "one name, not a list", "export TP_SOCKET_IFNAME=eth0"),
        ({"TP_SOCKET_IFNAME": "eno1"}, "there is no interface eno1", "export TP_SOCKET_IFNAME=eth0"),
    ],
)
def test_names_that_are_not_there(variables, words, fix):
    check, (finding,) = ask("ifname-exists", machine(ETH0, DOCKER0, **variables))
    assert (check.outcome, finding.severity, finding.fix) == (Outcome.FAILED, Severity.ERROR, fix)
    assert words in finding.summary
    assert finding.evidence == ("interfaces: lo, eth0, docker0",)


def test_a_mark_in_the_middle_is_a_name_to_nccl():
    _, (finding,) = ask("ifname-exists", machine(ETH0, DOCKER0, NCCL_SOCKET_IFNAME="^docker0,^lo"))
    assert (finding.severity, finding.fix) == (Severity.WARNING, "export NCCL_SOCKET_IFNAME=^docker0,lo")
    assert "it currently matches: lo, eth0" in finding.evidence


@pytest.mark.parametrize(
    "variables", [{}, {"NCCL_SOCKET_IFNAME": "x"}, {"GLOO_SOCKET_IFNAME": ""}, {"GLOO_SOCKET_IFNAME": "^"}]
)
def test_nothing_is_named(variables):
    check, findings = ask("ifname-exists", machine(**variables))
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())


def test_a_name_from_a_file_of_nccl():
    check, (finding,) = ask("ifname-exists", machine(conf=(conf_file(NCCL_SOCKET_IFNAME="eno1"),)))
    assert finding.fix == "put NCCL_SOCKET_IFNAME=eth0 into /etc/nccl.conf"
    assert (finding.code, finding.kind, check.id) == ("DD115", "nccl-conf", "ifname-exists")
    assert check.seen.startswith("NCCL_SOCKET_IFNAME=eno1 in /etc/nccl.conf")


def test_the_environment_wins_over_a_file():
    facts = machine(conf=(conf_file(NCCL_SOCKET_IFNAME="eno1"),), NCCL_SOCKET_IFNAME="eth0")
    assert ask("ifname-exists", facts)[0].outcome is Outcome.PASSED


def test_one_rank_has_another_value():
    good, bad = process(0, NCCL_SOCKET_IFNAME="eth0"), process(1, NCCL_SOCKET_IFNAME="eno1")
    facts = node(names=names("10.0.0.4"), network=network(), conf_files=(), processes=(good, bad))
    _, (finding,) = ask("ifname-exists", facts)
    assert finding.ranks == (1,)


@pytest.mark.parametrize("kind", ["ifname-exists", "iface-up"])
def test_interfaces_that_were_not_read(kind):
    check, findings = ask(kind, node(names=names("10.0.0.4"), network=NO_SYSFS, conf_files=()))
    assert (check.outcome, check.reason, findings) == (Outcome.SKIPPED, NO_SYSFS.reason, ())


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        (machine(), "Gloo would use eth0 (10.0.0.4), NCCL eth0 (10.0.0.4)"),
        (machine(ETH0, ETH1, NCCL_SOCKET_IFNAME="eth1"), "Gloo would use eth0 (10.0.0.4), NCCL eth1 (10.1.0.4)"),
        (machine(ETH0, ETH1, GLOO_SOCKET_IFNAME="eth1"), "Gloo would use eth1 (10.1.0.4), NCCL eth0 (10.0.0.4)"),
        (machine(own=("127.0.1.1",)), "Gloo would use lo (127.0.1.1), NCCL eth0 (10.0.0.4)"),
        (machine(own=()), "Gloo would use lo (127.0.0.1), NCCL eth0 (10.0.0.4)"),
        (machine(interface("eth0", up=False)), "Gloo would use lo (127.0.0.1), NCCL lo (127.0.0.1)"),
        (
            machine(ETH0, interface("eth1", up=False), NCCL_SOCKET_IFNAME="eth"),
            "Gloo would use eth0 (10.0.0.4), NCCL eth0 (10.0.0.4)",
        ),
    ],
)
def test_interfaces_in_use_are_up(facts, seen):
    check, findings = ask("iface-up", facts)
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, seen, ())


def test_without_names_the_choice_of_gloo_is_not_known():
    facts = node(names=NO_SYSFS, network=network(), conf_files=())
    assert ask("iface-up", facts)[0].seen == "it is unknown which interface Gloo would use, NCCL eth0 (10.0.0.4)"


DOWN = interface("eth1", "10.1.0.4/24", up=False, carrier=None)
NO_LINK = interface("eth1", "10.1.0.4/24", operstate="down", carrier=False)
BARE = interface("eth1")


@pytest.mark.parametrize(
    ("broken", "state"), [(DOWN, "which is down"), (NO_LINK, "which has no link"), (BARE, "which has no address")]
)
@pytest.mark.parametrize("library", ["NCCL", "GLOO"])
def test_an_interface_that_is_named_cannot_be_used(broken, state, library):
    check, (finding,) = ask("iface-up", machine(ETH0, broken, **{f"{library}_SOCKET_IFNAME": "eth1"}))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert finding.summary.endswith(f"would use eth1, {state}")
    assert finding.fix.endswith(f"or export {library}_SOCKET_IFNAME=eth0")
    assert finding.fix.startswith("ip link set dev eth1 up" if broken is DOWN else "ip address show dev eth1")


def test_one_of_several_that_are_set_for_nccl_is_a_warning():
    _, (finding,) = ask("iface-up", machine(ETH0, DOWN, NCCL_SOCKET_IFNAME="eth0,eth1"))
    assert finding.severity is Severity.WARNING


def test_the_host_name_leads_gloo_to_an_interface_that_is_down():
    _, (finding,) = ask("iface-up", machine(ETH0, NO_LINK, own=("10.1.0.4",)))
    assert finding.summary == "Gloo would use eth1, which has no link"
    assert finding.evidence == ("eth1: up, state down, no carrier, 10.1.0.4/24", "the host name's address is on it")


def test_loopback_alone_is_no_fault_of_this_check():
    facts = node(names=names("127.0.0.1"), network=network(LO, default=None), conf_files=())
    assert ask("iface-up", facts)[0].outcome is Outcome.PASSED
