import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.node import ConfFile
from tests.rules.environment.build import ask, node, process
from tests.rules.environment.link_facts import NO_RDMA, hca, rdma, roce
from tests.rules.environment.machine_facts import gpus

ELEVEN = tuple(hca(number) for number in range(11))


def conf(**variables):
    return (ConfFile(path="/etc/nccl.conf", variables=variables, hidden_by_env=(), hidden_by_file=(), bad_lines=()),)


def ask_hca(value, *devices, files=()):
    variables = {} if value is None else {"NCCL_IB_HCA": value}
    return ask("ib-hca-env", node(rdma=rdma(*devices), conf_files=files, processes=[process(**variables)]))


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, "NCCL_IB_HCA is not set: NCCL uses every active port"),
        ("mlx5", "NCCL_IB_HCA=mlx5 matches 4 of 4 ports: mlx5_0, mlx5_1, mlx5_2 and mlx5_3"),
        ("=mlx5_0,mlx5_1", "NCCL_IB_HCA==mlx5_0,mlx5_1 matches 2 of 4 ports: mlx5_0 and mlx5_1"),
        ("^mlx5_3", "NCCL_IB_HCA=^mlx5_3 matches 3 of 4 ports: mlx5_0, mlx5_1 and mlx5_2"),
        ("mlx5_0:1", "NCCL_IB_HCA=mlx5_0:1 matches 1 of 4 ports: mlx5_0"),
    ],
)
def test_values_that_fit_pass(value, seen):
    check, findings = ask_hca(value)
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, seen, ())


@pytest.mark.parametrize("value", ["mlx4_0", "=mlx5", "mlx5_0:2", "MLX5_0", " mlx5_0"])
def test_a_value_that_matches_nothing_is_an_error(value):
    _, (finding,) = ask_hca(value)
    assert finding.severity is Severity.ERROR
    assert finding.summary == (f"NCCL_IB_HCA={value} matches no RDMA device of this machine: NCCL will use TCP sockets")
    assert finding.evidence[0] == "devices here: mlx5_0, mlx5_1, mlx5_2 and mlx5_3"
    assert finding.fix == "export NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3"


def test_a_value_that_excludes_all_is_an_error():
    _, (finding,) = ask_hca("^mlx5")
    assert finding.summary.startswith("NCCL_IB_HCA=^mlx5 excludes every RDMA device")


def test_an_entry_that_matches_nothing_beside_one_that_does_is_a_warning():
    _, (finding,) = ask_hca("=mlx5_0,mlx5_9")
    assert (finding.severity, finding.summary) == (
        Severity.WARNING,
        "mlx5_9 in NCCL_IB_HCA==mlx5_0,mlx5_9 matches no RDMA device of this machine",
    )


def test_a_second_equals_sign_is_pointed_out():
    _, (finding,) = ask_hca("=mlx5_0,=mlx5_1")
    assert "= and ^ are only allowed once, before the whole list, not in =mlx5_1" in finding.evidence


def test_a_name_that_is_a_beginning_takes_more_than_was_meant():
    _, (finding,) = ask_hca("mlx5_0,mlx5_1", *ELEVEN)
    assert finding.severity is Severity.WARNING
    assert finding.summary == ("mlx5_1 in NCCL_IB_HCA=mlx5_0,mlx5_1 also takes mlx5_10: entries are prefixes of names")
    assert finding.fix == "export NCCL_IB_HCA==mlx5_0,mlx5_1"


def test_likewise_it_excludes_more():
    _, (finding,) = ask_hca("^mlx5_1", *ELEVEN)
    assert "also excludes mlx5_10" in finding.summary
    assert finding.fix == "export NCCL_IB_HCA=^=mlx5_1"


@pytest.mark.parametrize("value", ["mlx5_1,mlx5_10", "mlx5", "=mlx5_1"])
def test_what_was_meant_so_passes(value):
    assert ask_hca(value, *ELEVEN)[0].outcome is Outcome.PASSED


def test_a_value_of_a_file_is_named_with_the_file():
    _, (finding,) = ask_hca(None, files=conf(NCCL_IB_HCA="mlx4"))
    assert finding.summary.startswith("NCCL_IB_HCA=mlx4 in /etc/nccl.conf matches no RDMA device")
    assert (finding.code, finding.kind) == ("DD115", "nccl-conf")
    assert finding.fix == "remove NCCL_IB_HCA from /etc/nccl.conf"


def test_without_devices_it_is_an_error_only_where_gpus_are():
    processes = [process(NCCL_IB_HCA="mlx5_0")]
    _, (finding,) = ask("ib-hca-env", node(rdma=NO_RDMA, gpus=gpus(8), processes=processes))
    assert finding.severity is Severity.ERROR
    check, _ = ask("ib-hca-env", node(rdma=NO_RDMA, processes=processes))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, "there is no RDMA device")
    check, _ = ask("ib-hca-env", node(rdma=NO_RDMA, gpus=gpus(8)))
    assert check.outcome is Outcome.SKIPPED


def test_it_does_not_apply_to_efa():
    assert ask_hca("mlx5", hca(0, name="efa_0", link_layer="Unspecified"))[0].outcome is Outcome.SKIPPED


def ask_disabled(section, files=(), **variables):
    return ask("ib-disabled", node(rdma=section, conf_files=files, processes=[process(**variables)]))


@pytest.mark.parametrize("variables", [{}, {"NCCL_IB_DISABLE": "0"}, {"NCCL_NET": "IB"}, {"NCCL_IB_DISABLE": "no"}])
def test_rdma_that_is_on_passes(variables):
    assert ask_disabled(rdma(), **variables)[0].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("variables", "fix"),
    [
        ({"NCCL_IB_DISABLE": "1"}, "unset NCCL_IB_DISABLE"),
        ({"NCCL_NET": "Socket"}, "unset NCCL_NET"),
    ],
)
@pytest.mark.parametrize("section", [rdma(), rdma(roce(0), roce(1))], ids=["InfiniBand", "RoCE"])
def test_a_network_that_is_switched_off_is_a_warning(section, variables, fix):
    _, (finding,) = ask_disabled(section, **variables)
    assert (finding.severity, finding.fix) == (Severity.WARNING, fix)
    assert finding.summary.endswith("disables this machine's RDMA network: NCCL will use TCP sockets")


def test_a_file_may_switch_it_off():
    _, (finding,) = ask_disabled(rdma(), conf(NCCL_NET="Socket"))
    assert (finding.kind, finding.fix) == ("nccl-conf", "remove NCCL_NET from /etc/nccl.conf")


def test_ib_disable_in_a_file_is_left_to_nccl_conf():
    assert ask_disabled(rdma(), conf(NCCL_IB_DISABLE="1"))[0].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    "section",
    [rdma(roce(0)), rdma(roce(0, rate=25.0), roce(1, rate=25.0)), rdma(hca(0, state="DOWN/Polling"))],
    ids=["one Ethernet card", "slow Ethernet cards", "down"],
)
def test_an_everyday_card_may_be_left_alone(section):
    check, _ = ask_disabled(section, NCCL_IB_DISABLE="1")
    assert (check.outcome, "no port is on a training network" in check.seen) == (Outcome.PASSED, True)
