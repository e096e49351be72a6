"""What the variables say of nodes and of the store's place is read as torchrun reads it."""

import pytest

from ddpdoctor.model.rendezvous import (
    endpoints,
    in_slurm_step,
    is_loopback,
    is_loopback_address,
    nodes_range,
    parse_endpoint,
    read_node_count,
)
from tests.rules.environment.build import process


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0", "node0", None),
        ("node0:29400", "node0", 29400),
        (" 10.0.0.1:1 ", "10.0.0.1", 1),
        ("[fd00::1]:29400", "fd00::1", 29400),
        ("[fd00::1]", "fd00::1", None),
    ],
)
def test_endpoint(text, host, port):
    found = parse_endpoint(text, "PET_RDZV_ENDPOINT")
    assert (found.host, found.port) == (host, port)


def test_an_empty_endpoint():
    assert parse_endpoint("  ", "PET_RDZV_ENDPOINT") is None


def test_all_endpoints():
    found = endpoints(process(0, MASTER_ADDR="a", MASTER_PORT="1", PET_MASTER_ADDR="b", PET_RDZV_ENDPOINT="c:3"))
    assert [(one.variable, one.host, one.port) for one in found] == [
        ("MASTER_ADDR", "a", 1), ("PET_MASTER_ADDR", "b", None), ("PET_RDZV_ENDPOINT", "c", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "nodes"), [("2", (2, 2)), ("1:4", (1, 4)), ("", None), ("auto", None), ("1:", None), ("9" * 5000, None)]
)
def test_nodes_range(text, nodes):
    assert nodes_range(text) == nodes


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, None),
        ({"WORLD_SIZE": "16"}, None),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 2),
        ({"WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "8"}, 2),
        ({"PET_NNODES": "1:4"}, 4),
        ({"SLURM_NNODES": "4"}, None),
        ({"SLURM_NNODES": "4", "SLURM_STEP_ID": "0"}, 4),
        ({"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "1", "PET_NNODES": "4"}, 1),
    ],
)
def test_nodes_given(variables, nodes):
    given = read_node_count(process(0, **variables))
    assert (given.nodes if given is not None else None) == nodes


@pytest.mark.parametrize(
    ("step", "found"), [("0", True), ("4294967290", False), ("4294967291", False), ("", False), ("batch", False)]
)
def test_in_slurm_step(step, found):
    assert in_slurm_step(process(0, SLURM_STEP_ID=step)) is found


@pytest.mark.parametrize(
    ("host", "name", "address"),
    [
        ("localhost", True, False),
        ("Localhost.", True, False),
        ("127.0.0.1", True, True),
        ("::1", True, True),
        ("0.0.0.0", True, False),
        ("::", True, False),
        ("10.0.0.1", False, False),
        ("fe80::1%eth0", False, False),
        ("node0", False, False),
    ],
)
def test_loopback(host, name, address):
    assert (is_loopback(host), is_loopback_address(host)) == (name, address)
