"""What NCCL's own log tells: networks, ways between ranks, NVLink SHARP."""

import pytest

from ddpdoctor.model.bandwidth import NcclLog
from ddpdoctor.probes.bandwidth.nccl_log import nccl_log_environment, parse_nccl_log, read_nccl_log
from tests.machines import DATA

LOGS = DATA / "nccl-logs"


def seen(name):
    return parse_nccl_log((LOGS / f"{name}.txt").read_text(encoding="utf-8"), 3)


def log(network, interfaces, transports, nvls=None):
    return NcclLog(rank=3, network=network, interfaces=interfaces, transports=transports, nvls=nvls)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The second communicator, of two ranks, has no NVLS channels; the first one has.
        ("nvlink8", log("IB", ("mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"), {"P2P/CUMEM": 4}, nvls=True)),
        (
            "ib-gdr",
            log(
                "IBext_v8",
                ("mlx5_0:1", "mlx5_1:1", "mlx5_2:1"),
                {"NET/IBext_v8/GDRDMA": 3, "P2P/IPC": 1},
                nvls=True,
            ),
        ),
        ("ib-no-gdr", log("IB", ("mlx5_0:1",), {"NET/IB": 2})),
        ("sockets", log("Socket", ("eth0", "ens7"), {"NET/Socket": 2, "SHM": 1}, nvls=False)),
        ("no-p2p", log("Socket", ("bond0",), {"SHM": 2})),
        ("no-nvls", log("IB", ("mlx5_0:1",), {"P2P/CUMEM": 2}, nvls=False)),
        ("plugin", log("AWS Libfabric", (), {"NET/AWS Libfabric/GDRDMA": 1, "P2P/direct pointer": 1})),
    ],
)
def test_a_log(name, expected):
    assert seen(name) == expected


def test_cards_as_nccl_2_30_names_them():
    text = (
        "n1:8:8 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1 [1]mlx5_1:1 [RO]; OOB eth0:10.0.0.1<0>\n"
        "n1:8:8 [0] NCCL INFO Using network IB\n"
    )
    assert parse_nccl_log(text, 3) == log("IB", ("mlx5_0:1", "mlx5_1:1"), {})


@pytest.mark.parametrize("text", ["", "\n\n", "NCCL version 2.26.2+cuda12.8\n", "\0\0 Using network IB"])
def test_a_log_that_says_nothing_of_the_network(text):
    assert parse_nccl_log(text, 0) is None


def test_a_communicator_that_never_came_about():
    assert seen("one-rank") is None


def test_lines_that_are_cut_off_or_none_of_nccl_do_no_harm():
    text = (LOGS / "nvlink8.txt").read_text(encoding="utf-8")
    for end in range(0, len(text), 97):
        found = parse_nccl_log(text[:end] + "\nChannel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n", 3)
        assert found is None or found.network == "IB"


def test_the_variables_that_make_nccl_log(tmp_path):
    assert nccl_log_environment({"HOME": "/root", "NCCL_DEBUG": ""}, str(tmp_path / "100%")) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT",
        "NCCL_DEBUG_FILE": f"{tmp_path}/100%%/nccl.%h.%p.log",
    }


@pytest.mark.parametrize("env", [{"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG_FILE": "/tmp/nccl.log"}])
def test_a_user_who_looks_at_the_log_keeps_it(env):
    assert nccl_log_environment(env, "/tmp/x") == {}


def test_the_folder(tmp_path):
    assert read_nccl_log(str(tmp_path), 3) is None
    text = (LOGS / "no-p2p.txt").read_bytes()
    (tmp_path / "nccl.dgx01.4300.log").write_bytes(text + b"\xff\xfe")

    assert read_nccl_log(str(tmp_path), 3) == seen("no-p2p")
