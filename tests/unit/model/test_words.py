"""Words of Slurm, of variables, of meetings and of shares."""

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from ddpdoctor.model.data import SamplingPlan, Sharing, count_both, share_out
from ddpdoctor.model.launch import (
    FAMILIES,
    NEWEST,
    PLUGIN_PREFIXES,
    endpoints,
    expand_counts,
    expand_hosts,
    find_variable,
    hide_login,
    in_slurm_step,
    is_listed,
    is_loopback,
    is_loopback_address,
    looks_known,
    nodes_range,
    parse_endpoint,
    read_node_count,
    read_variables,
    select_variables,
)
from ddpdoctor.model.node import release
from ddpdoctor.rules.variables import CONDITIONS, OWNERS, TYPES, check_value
from tests.golden import words
from tests.rules.environment.build import process

# What the variables say of nodes and of the store's place is read as torchrun reads it.


def read(variables):
    return process(0, **dict(word.split("=") for word in variables.split()))


test_words = words(
    __name__,
    parse_endpoint=lambda text: parse_endpoint(text, "PET_RDZV_ENDPOINT"),
    endpoints=lambda variables: endpoints(read(variables)),
    nodes_range=nodes_range, is_loopback=is_loopback, is_loopback_address=is_loopback_address,
    in_slurm_step=lambda step: in_slurm_step(process(0, SLURM_STEP_ID=step)),
    read_node_count=lambda variables: read_node_count(read(variables)),
    expand_hosts=expand_hosts, expand_counts=expand_counts, hide_login=hide_login,
)  # fmt: skip


# The arithmetic of an epoch, held to torch's own sampler and loader.


def test_which_samples_a_shuffle_leaves_out_on_each_rank_is_not_foretold():
    shares = share_out(SamplingPlan(samples=10, world_size=2, batch_size=4, drop_last=True, sharing=Sharing.NONE))
    assert (shares.unique, shares.duplicates, shares.missed) == (None, None, None)


def drawn_by_torch(plan):
    """Return for each rank how many indices its sampler gives, and the batches of its loader."""
    from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

    found = []
    for rank in range(plan.world_size):
        samples: object = range(plan.samples)
        if plan.sharing is Sharing.SAMPLER:
            sampler = DistributedSampler(
                samples, plan.world_size, rank, shuffle=plan.shuffle, drop_last=plan.sampler_drop_last
            )
        else:
            samples = range(plan.samples)[rank :: plan.world_size] if plan.sharing is Sharing.SPLIT else samples
            sampler = SequentialSampler(samples)
        loader = DataLoader(
            samples, plan.batch_size, sampler=sampler, drop_last=plan.drop_last, collate_fn=list
        )  # fmt: skip
        found.append((len(list(sampler)), list(loader)))
    return found


def plans():
    flags = (False, True)
    sizes = ((1, 2, 5, 16, 17), (1, 2, 3, 7), (1, 3, 8))
    for samples, world_size, batch_size in itertools.product(*sizes):
        for drop_last, sampler_drop_last, shuffle in itertools.product(flags, flags, flags):
            yield SamplingPlan(
                samples=samples, world_size=world_size, batch_size=batch_size, drop_last=drop_last,
                sampler_drop_last=sampler_drop_last, shuffle=shuffle,
            )  # fmt: skip
        for drop_last, sharing in itertools.product(flags, (Sharing.SPLIT, Sharing.NONE)):
            if sharing is Sharing.NONE or samples >= world_size:
                yield SamplingPlan(
                    samples=samples, world_size=world_size, batch_size=batch_size, drop_last=drop_last,
                    sharing=sharing, shuffle=False,
                )  # fmt: skip


def test_every_number_is_that_of_torch():
    for plan in plans():
        shares, seen = share_out(plan), drawn_by_torch(plan)
        delivered = Counter(sample for _, batches in seen for batch in batches for sample in batch)
        assert [one.drawn for one in shares.ranks] == [drawn for drawn, _ in seen], plan
        assert [one.batches for one in shares.ranks] == [len(batches) for _, batches in seen], plan
        assert [one.last_batch for one in shares.ranks] == [len(b[-1]) if b else 0 for _, b in seen], plan
        assert [one.delivered for one in shares.ranks] == [sum(map(len, batches)) for _, batches in seen], plan
        assert (shares.unique, shares.delivered) == (len(delivered), delivered.total()), plan
        assert shares.missed == plan.samples - len(delivered), plan
        sets = [{sample for batch in batches for sample in batch} for _, batches in seen]
        both = [[count_both(plan, one, other) for other in shares.ranks] for one in shares.ranks]
        assert both == [[len(one & other) for other in sets] for one in sets], plan


def test_what_a_sampler_repeats_is_counted_where_it_is_drawn():
    from torch.utils.data import DistributedSampler

    for samples, world_size in itertools.product((1, 2, 3, 5, 10), (1, 2, 4, 7)):
        shares = share_out(SamplingPlan(samples=samples, world_size=world_size, batch_size=1, shuffle=False))
        positions = [
            list(DistributedSampler(range(samples), world_size, rank, shuffle=False)) for rank in range(world_size)
        ]
        seen: set[int] = set()
        repeated = [0] * world_size
        for place in range(len(positions[0])):
            for rank in range(world_size):
                repeated[rank] += positions[rank][place] in seen
                seen.add(positions[rank][place])
        assert [one.repeated for one in shares.ranks] == repeated


# Slurm's short forms, damaged and absurd ones: the table has the others.


@pytest.mark.parametrize(
    ("expand", "text", "said"),
    [
        (expand_hosts, "n[" + "9" * 5000 + "]", r"not a|empty"), (expand_counts, "9" * 5000, "not a list of counts"),
        (expand_counts, "x" * 10_000, r"\.\.\.$"),
    ],
)  # fmt: skip
def test_absurd_short_forms_are_refused_at_once(expand, text, said):
    with pytest.raises(ValueError, match=said):
        expand(text)


# The table of variables: every row is well-formed, says where it is from, and means something to the rules.


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
    agreed = {row.name for row in ROWS if row.agree}
    assert names | {"NCCL_CUMEM_ENABLE", "NCCL_P2P_LEVEL", "TORCH_DISTRIBUTED_DEBUG"} <= agreed
    assert not {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "RANK", "CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"} & agreed


def test_what_may_be_secret_is_never_listed():
    secret = "NCCL_SOCKET_MAGIC SLURM_JWT HF_TOKEN AWS_SECRET_ACCESS_KEY WANDB_API_KEY PATH NCCL_PSK HOME"
    for name in secret.split():
        assert not is_listed(name)
        listed, others = select_variables({name: "hunter2"})
        assert (listed, "hunter2" in others) == ({}, False)


def test_prefixes_of_plugins_are_left_alone():
    assert not any(looks_known(f"{prefix}X") for prefix in PLUGIN_PREFIXES)
    assert all(looks_known(f"{prefix}X") for prefix in FAMILIES)


def test_the_environment_is_sorted_into_values_and_bare_names():
    env = {
        "NCCL_DEBUG": "INFO", "NCCL_DEBGU": "secret", "nccl_debug": "x", "NCLL_DEBUG": "x", "OFI_NCCL_TUNER": "1",
        "NCCL_FASTRAK_CTRL_DEV": "eth0", "NCCL_SOCKET_MAGIC": "s", "NCCL_VERSION": "2.21.5-1", "RCCL_FOO": "1",
        "HCCL_SOCKET_IFNAME": "eth0", "PATH": "/bin", "RANK": "0",
    }  # fmt: skip
    listed, others = select_variables(env)
    assert listed == {"NCCL_DEBUG": "INFO", "NCCL_VERSION": "2.21.5-1", "RANK": "0"}
    assert others == ("NCCL_DEBGU", "NCLL_DEBUG", "nccl_debug")


def test_to_import_the_table_reads_nothing():
    code = (
        "import sys; from ddpdoctor.model import launch; "
        "sys.exit(launch.read_variables.cache_info().currsize or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'ddpdoctor[mcp]'"),
        ('{"url": "file:///src/ddp%20doctor", "dir_info": {"editable": true}}', "pip install '/src/ddp doctor[mcp]'"),
        ('{"url": "file:///tmp/ddpdoctor-1-py3-none-any.whl"}', "pip install '/tmp/ddpdoctor-1-py3-none-any.whl[mcp]'"),
        ('{"url": "https://example.org/ddpdoctor.git"}', "pip install 'ddpdoctor[mcp]'"),
        ("{damaged", "pip install 'ddpdoctor[mcp]'"),
    ],
)
def test_an_extra_is_installed_from_where_ddpdoctor_came_from(tmp_path: Path, origin: str | None, command: str) -> None:
    installed = tmp_path / "ddpdoctor-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: ddpdoctor\nVersion: 1\n")
    if origin is not None:
        (installed / "direct_url.json").write_text(origin)
    ask = "from ddpdoctor.model.errors import install_command; print(install_command('mcp'))"
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[3])))
    done = subprocess.run(
        [sys.executable, "-c", ask], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == command + "\n"
