"""The table of variables: every row is well-formed, says where it is from, and means something to the rules."""

import re
import subprocess
import sys
from dataclasses import replace
from importlib import resources

import pytest

from ddpdoctor.model.software import release
from ddpdoctor.model.variables import (
    FAMILIES,
    NEWEST,
    PLUGIN_PREFIXES,
    find_variable,
    hide_login,
    is_listed,
    looks_known,
    must_agree,
    read_variables,
    select_variables,
)
from ddpdoctor.rules.variable_dangers import CONDITIONS
from ddpdoctor.rules.variable_flaws import OWNERS
from ddpdoctor.rules.variable_values import TYPES, check_value

KINDS = {
    "config", "tune", "debug", "internal", "danger", "deprecated", "removed", "bogus", "launcher", "slurm", "k8s",
    "mpi", "build",
}  # fmt: skip
COMPONENTS = {
    "nccl", "torch", "gloo", "launcher", "slurm", "k8s", "mpi", "cuda", "container", "openmp", "network", "loader",
    "build", "ddpdoctor",
}  # fmt: skip
ROWS = tuple(read_variables().values())


def faults(row):
    """Yield what is wrong with a row."""
    danger = row.danger.split(" ")[-1].partition(":")[0]
    outdated = row.kind in {"deprecated", "removed", "bogus"}
    yield "name", not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", row.name)
    yield "kind", row.kind not in KINDS
    yield "component", row.component not in COMPONENTS
    yield "type", row.type.partition(":")[0] not in TYPES
    yield "source", not row.source
    yield "version", not all(re.fullmatch(r"(\d+(\.\d+)*)?", version) for version in (row.since, row.until))
    yield "condition", danger not in {*CONDITIONS, ""}
    yield "danger without a condition", row.kind == "danger" and not danger
    yield "danger without a consequence", bool(danger) and not row.note
    yield "out of use without a reason", outdated and not (row.replaced_by or row.until or row.note)
    yield "out of use, and nobody's", outdated and row.component not in OWNERS
    yield "successor", bool(row.replaced_by) and find_variable(row.replaced_by) is None
    yield "default", bool(row.default) and check_value(replace(row, default=""), row.default) is not None


def test_every_row_is_well_formed_has_a_source_and_what_its_kind_needs():
    assert [(row.name, fault) for row in ROWS for fault, is_so in faults(row) if is_so] == []


def test_the_table_is_sorted_out_into_unique_names():
    text = resources.files("ddpdoctor.model").joinpath("variables.tsv").read_text(encoding="utf-8")
    names = [line.split("\t")[0] for line in text.splitlines()]
    assert len(names) == len(set(names)) == len(ROWS) + 1


def test_no_version_of_the_table_is_newer_than_what_it_was_read_from():
    for row in ROWS:
        if row.component in NEWEST:
            newest = release(NEWEST[row.component])
            assert max(release(row.since), release(row.until))[:2] <= newest[:2], row.name


def test_what_must_agree_is_named():
    names = {"NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_CROSS_NIC", "NCCL_IB_TC"}
    assert names | {"NCCL_CUMEM_ENABLE", "NCCL_P2P_LEVEL", "TORCH_DISTRIBUTED_DEBUG"} <= must_agree()
    assert not {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "RANK", "CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"} & must_agree()


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_SOCKET_MAGIC",
        "SLURM_JWT",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "PATH",
        "NCCL_PSK",
        "HOME",
    ],
)
def test_what_may_be_secret_is_never_listed(name):
    assert not is_listed(name)
    listed, others = select_variables({name: "hunter2"})
    assert not listed
    assert "hunter2" not in others


def test_the_environment_is_sorted_into_values_and_bare_names():
    env = {
        "NCCL_DEBUG": "INFO", "NCCL_DEBGU": "secret", "nccl_debug": "x", "NCLL_DEBUG": "x", "OFI_NCCL_TUNER": "1",
        "NCCL_FASTRAK_CTRL_DEV": "eth0", "NCCL_SOCKET_MAGIC": "s", "NCCL_VERSION": "2.21.5-1", "RCCL_FOO": "1",
        "HCCL_SOCKET_IFNAME": "eth0", "PATH": "/bin", "RANK": "0",
    }  # fmt: skip
    listed, others = select_variables(env)
    assert listed == {"NCCL_DEBUG": "INFO", "NCCL_VERSION": "2.21.5-1", "RANK": "0"}
    assert others == ("NCCL_DEBGU", "NCLL_DEBUG", "nccl_debug")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://ann:pw@proxy:3128", "http://proxy:3128"),
        ("ann:pw@proxy:3128", "proxy:3128"),
        ("http://proxy:3128/", "http://proxy:3128/"),
        ("http://token@proxy", "http://proxy"),
        ("=mlx5_0:1,mlx5_1", "=mlx5_0:1,mlx5_1"),
        ("[fe80::1]:29500", "[fe80::1]:29500"),
    ],
)
def test_a_login_in_a_value_is_taken_out(value, shown):
    assert hide_login(value) == shown


def test_prefixes_of_plugins_are_left_alone():
    for prefix in PLUGIN_PREFIXES:
        assert not looks_known(f"{prefix}X")
    for prefix in FAMILIES:
        assert looks_known(f"{prefix}X")


def test_to_import_the_table_reads_nothing():
    code = (
        "import sys; from ddpdoctor.model import variables; "
        "sys.exit(variables.read_variables.cache_info().currsize or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0
