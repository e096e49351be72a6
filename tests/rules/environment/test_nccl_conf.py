"""DD115, over files of every kind of fault."""

import subprocess

import pytest

from ddpdoctor.collect.machine.nccl_conf import read_conf_files
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.system import System
from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.node import ConfFile
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, failed, node, process
from tests.rules.environment.test_variables import NO_RDMA, rdma, software

WARNING, INFO = Severity.WARNING, Severity.INFO


def conf(path="/etc/nccl.conf", *, variables=None, **more):
    values = variables or {}
    fields = {"hidden_by_env": (), "hidden_by_file": (), "bad_lines": (), **more}
    return ConfFile(path=path, variables=values, lines={name: i for i, name in enumerate(values, 1)}, **fields)


def look(*files, nccl=None, processes=(), **more):
    sections = {"software": software(nccl=nccl), "rdma": NO_RDMA, **more}
    return ask("nccl-conf", node(processes=processes, conf_files=files, **sections))


def only(*files, **more):
    check, findings = look(*files, **more)
    assert check.outcome is failed(*(one.severity for one in findings))
    (finding,) = findings
    assert (finding.kind, finding.ranks) == ("nccl-conf", ())
    return finding


def test_no_file_is_skipped():
    check, findings = look()
    assert (check.outcome, findings) == (Outcome.SKIPPED, ())
    assert check.reason.startswith("there is no /etc/nccl.conf or ~/.nccl.conf")


def test_files_that_were_not_read_are_no_healthy_ones():
    unread = Unread(why=Why.TIMEOUT, reason="conf_files did not answer within 2 s")
    check, _ = ask("nccl-conf", node(conf_files=unread))
    assert check.outcome is Outcome.INCONCLUSIVE


def test_a_healthy_file_passes_and_is_shown():
    check, findings = look(conf(variables={"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"}))
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert check.seen == "/etc/nccl.conf sets NCCL_DEBUG, NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("name", "value", "severity", "words", "fix"),
    [
        ("NCCL_P2P_DISABLE", "1", WARNING, "through host memory", "sed -i 1d /etc/nccl.conf"),
        ("NCCL_DEBUGS", "", WARNING, "did you mean NCCL_DEBUG?", "sed -i '1s/^[^=]*/NCCL_DEBUG/' /etc/nccl.conf"),
        ("NCCL_QUX_QUX", "", INFO, "no known name is similar", "sed -i 1d /etc/nccl.conf"),
        ("NCCL_SOCKET_FAMILY", "ipv4", WARNING, "AF_INET or AF_INET6",
         r"sed -i '1c\NCCL_SOCKET_FAMILY=AF_INET' /etc/nccl.conf"),
        ("NCCL_MAX_NRINGS", "4", WARNING, "old name", "sed -i '1s/^[^=]*/NCCL_MAX_NCHANNELS/' /etc/nccl.conf"),
        ("NCCL_LL_THRESHOLD", "4", WARNING, "has no effect", "sed -i 1d /etc/nccl.conf"),
        ("NCCL_IB_HCA", '"mlx5_0"', WARNING, "quotation marks", r"sed -i '1c\NCCL_IB_HCA=mlx5_0' /etc/nccl.conf"),
        ("NCCL_IB_HCA", "mlx5_0\r", WARNING, "whitespace", r"sed -i '1c\NCCL_IB_HCA=mlx5_0' /etc/nccl.conf"),
        ("NCCL_DEBUG", "INFO # now", WARNING, "prints nothing", r"sed -i '1c\NCCL_DEBUG=INFO' /etc/nccl.conf"),
        ("NCCL_IB_HCA", "mlx5_0 # old", WARNING, "the comment", r"sed -i '1c\NCCL_IB_HCA=mlx5_0' /etc/nccl.conf"),
    ],
)  # fmt: skip
def test_every_class_of_flaw_has_the_files_own_kind(name, value, severity, words, fix):
    finding = only(conf(variables={name: value}))
    assert finding.severity is severity
    assert words in finding.summary
    assert finding.fix == fix
    assert finding.evidence[0].startswith(name)
    assert "is in line 1 of /etc/nccl.conf; the environment does not show it" in finding.evidence[0]


def test_infiniband_switched_off_in_a_file_is_the_files_finding_even_where_a_port_is_active():
    finding = only(conf(variables={"NCCL_IB_DISABLE": "1"}), rdma=rdma("ACTIVE"))
    assert (finding.severity, "TCP sockets" in finding.summary) == (WARNING, True)


def test_what_the_environment_or_an_earlier_file_hides_is_not_reported():
    user = conf("/root/.nccl.conf", variables={"NCCL_DEBUG": "WARN"})
    system = conf(
        variables={"NCCL_DEBUG": "verbose", "NCCL_P2P_DISABLE": "1"},
        hidden_by_env=("NCCL_P2P_DISABLE",),
        hidden_by_file=("NCCL_DEBUG",),
    )
    assert look(user, system)[1] == ()


def test_what_is_none_of_nccls_is_neither_reported_nor_shown():
    check, findings = look(conf(variables={"API_TOKEN": "", "OFI_NCCL_PROTOCOL": ""}))
    assert (check.outcome, findings) == (Outcome.PASSED, ())


def test_lines_that_nccl_cannot_read():
    finding = only(conf(bad_lines=(3,)))
    assert finding.severity is WARNING
    assert finding.summary == "line 3 of /etc/nccl.conf is not NAME=VALUE from the first column, so it has no effect"
    assert only(conf(bad_lines=(3, 5))).summary.startswith("each of the lines 3, 5 of")


def test_a_name_that_is_set_twice():
    finding = only(conf(repeated_lines=(4,)))
    assert finding.summary == "line 4 of /etc/nccl.conf repeats an earlier setting, so it has no effect"


def test_a_file_that_is_asked_for_and_not_there():
    finding = only(conf("/opt/nccl.conf", unread="there is no such file"))
    assert finding.summary == "NCCL does not read /opt/nccl.conf: there is no such file"
    assert finding.fix == "ls -l /opt/nccl.conf, or unset NCCL_CONF_FILE"


@pytest.mark.parametrize(
    ("nccl", "read_by_home", "read_by_database"),
    [
        ("2.27.5", False, True),
        ("2.29.7", False, True),
        ("2.30.3", True, False),
        ("2.32.3", True, False),
        (None, True, True),
    ],
)
def test_which_home_counts_is_a_matter_of_the_version(nccl, read_by_home, read_by_database):
    by_home = conf("/tmp/home/.nccl.conf", variables={"NCCL_P2P_DISABLE": "1"}, since="2.30.3")
    by_database = conf("/root/.nccl.conf", variables={"NCCL_SHM_DISABLE": "1"}, until="2.29.7")
    summaries = [finding.summary for finding in look(by_home, by_database, nccl=nccl)[1]]
    assert any(summary.startswith("NCCL_P2P_DISABLE=1") for summary in summaries) is read_by_home
    assert any(summary.startswith("NCCL_SHM_DISABLE=1") for summary in summaries) is read_by_database
    assert (
        any(summary.startswith("NCCL does not read /tmp/home/.nccl.conf") for summary in summaries) is not read_by_home
    )
    unread = any(summary.startswith("NCCL does not read /root/.nccl.conf") for summary in summaries)
    assert unread is not read_by_database


def test_the_flaws_are_judged_by_the_processes_own_scene():
    ranks = [process(rank, LOCAL_WORLD_SIZE="2", NCCL_DEBUG="INFO") for rank in (0, 1)]
    finding = only(conf(variables={"NCCL_DEBUG_FILE": "/tmp/nccl.log"}), processes=ranks)
    assert "overwrites the others' lines" in finding.summary


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("export NCCL_DEBUG = WARN\n", "NCCL_DEBUG=WARN\n"),
        ("# ours\n  NCCL_DEBUG=WARN\n", "# ours\nNCCL_DEBUG=WARN\n"),
        ("NCCL_SOCKET_FAMILY=ipv4\n", "NCCL_SOCKET_FAMILY=AF_INET\n"),
        ("NCCL_DEBUGS=WARN\nNCCL_IB_TC=106\n", "NCCL_DEBUG=WARN\nNCCL_IB_TC=106\n"),
        ("NCCL_IB_TC=106\nNCCL_SHM_DISABLE=1\n", "NCCL_IB_TC=106\n"),
        ("NCCL_IB_TC=106\nNCCL_IB_TC=104\n", "NCCL_IB_TC=106\n"),
        ("NCCL_IB_HCA='mlx5_0'\n", "NCCL_IB_HCA=mlx5_0\n"),
    ],
)
def test_the_command_of_the_finding_mends_the_file(tmp_path, text, mended):
    path = tmp_path / "nccl conf"
    path.write_text(text, encoding="utf-8")
    system = System(env={"NCCL_CONF_FILE": str(path)})
    plan = ReadingPlan(sections=frozenset())
    files = tuple(file for file in read_conf_files(system, plan) if file.path == str(path))
    finding = only(*files)
    subprocess.run(finding.fix, shell=True, check=True, timeout=200)
    assert path.read_text(encoding="utf-8") == mended
    files = tuple(file for file in read_conf_files(system, plan) if file.path == str(path))
    assert look(*files)[1] == ()
