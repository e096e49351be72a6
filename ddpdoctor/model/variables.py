"""The table of environment variables that NCCL, torch, Gloo and the launchers read.

The table is ``variables.tsv`` beside this file. It is read on first use. Its names are the allow-list: the value of any
other variable is never kept, so that no secret of the environment gets into a report.
"""

from __future__ import annotations

import pkgutil
import re
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FAMILIES = (
    "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "GLOO_", "TORCHELASTIC_", "CUDA_VISIBLE_", "OMP_NUM_",
)  # fmt: skip
"""Prefixes that only NCCL, torch, Gloo, torchrun, CUDA or OpenMP use."""
MISSPELT_FAMILIES = ("NCLL_", "NCL_", "NCC_", "NCCLL_", "NNCL_", "NCLC_", "CNCL_", "TORCH_NCLL_", "TORCH_NCL_", "GLO_")
"""Common typos. RCCL, HCCL, MCCL and UCCL are missing because they are other libraries."""
PLUGIN_PREFIXES = (
    "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_NETWORKING_", "NCCL_TUNER_CONFIG_", "NCCL_SHARP_", "NCCL_UCX_",
    "NCCL_DMABUF_", "NCCL_TESTS_", "NCCL_INSPECTOR_", "NCCL_PROFILE_", "NCCL_PLUGIN_", "NCCL_SHIMNET_", "OFI_NCCL_",
)  # fmt: skip
"""Prefixes of network, tuner and profiler plugins and of nccl-tests. The table cannot list all their variables."""
NEWEST = {"nccl": "2.32.3", "torch": "2.13"}
"""The last releases in the table. NCCL's names come from the source up to 2.30.7, and from the library of 2.32.3."""
OLDEST = {"nccl": "2.21.5", "torch": "2.6"}
"""The oldest supported torch and its NCCL. Older versions do not matter."""
HIDDEN = "hidden"
"""The type of a known variable whose value is never kept."""

_LOGIN = re.compile(r"(?<=//)[^/@\s]*@|^[^/@\s]+:[^/@\s]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A row of the table. Versions are those of ``component``; empty if unknown."""

    name: str
    component: str
    """Who reads it: nccl, torch, gloo, launcher, slurm, k8s, mpi, cuda, container, openmp, network, loader, build."""
    kind: str
    """config, tune, debug, internal, danger, deprecated, removed, bogus (never existed), launcher, slurm, build, …"""
    type: str
    """The valid values, in the grammar of ``rules/variable_values.py``."""
    default: str
    since: str
    """The first version that reads it."""
    until: str
    """The last version that reads it. For a deprecated variable, the last version before its deprecation."""
    replaced_by: str
    agree: bool
    """Whether it must be equal on all ranks."""
    danger: str
    """The harmful values, in the grammar of ``rules/variable_dangers.py``; empty: none."""
    source: str
    note: str

    @property
    def shown(self) -> bool:
        """Whether its value may be kept and shown."""
        return self.type != HIDDEN


@cache
def read_variables() -> Mapping[str, Variable]:
    """Return the table by name."""
    table = pkgutil.get_data("ddpdoctor.model", "variables.tsv") or b""  # importlib.resources takes 20 ms to import
    names = [one.name for one in fields(Variable)]
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in table.decode("utf-8").splitlines()[1:]]
    return {row["name"]: Variable(**{**row, "agree": row["agree"] == "yes"}) for row in rows}  # type: ignore[arg-type]


def find_variable(name: str) -> Variable | None:
    """Return the row of a variable, or None. Names are case-sensitive, like the environment."""
    return read_variables().get(name)


def is_listed(name: str) -> bool:
    """Return whether the value of a variable may be kept and shown."""
    variable = find_variable(name)
    return variable is not None and variable.shown


def must_agree() -> frozenset[str]:
    """Return the names of the variables that must be equal on all ranks."""
    return frozenset(variable.name for variable in read_variables().values() if variable.agree)


def is_plugin_name(name: str) -> bool:
    """Return whether a name belongs to a plugin, whose variables are not in the table."""
    return name.startswith(PLUGIN_PREFIXES)


def looks_known(name: str) -> bool:
    """Return whether a name looks like a variable of NCCL, torch, Gloo or torchrun, even if misspelled."""
    upper = name.upper()
    return upper.startswith((*FAMILIES, *MISSPELT_FAMILIES)) and not is_plugin_name(upper)


def select_variables(env: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the listed variables with values, and the names of unlisted variables that look like one."""
    listed = {name: hide_login(env[name]) for name in sorted(env) if is_listed(name)}
    others = tuple(name for name in sorted(env) if find_variable(name) is None and looks_known(name))
    return listed, others


def hide_login(value: str) -> str:
    """Remove the user name and password of a URL or host from a value."""
    return _LOGIN.sub("", value)
