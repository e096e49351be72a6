"""torchrun's settings about the nodes of a job, from its options or else from its PET_* variables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.launch.command.command_line import split_command
from ddpdoctor.launch.command.torchrun_table import TORCHRUN_OPTIONS, canonical
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import nodes_range, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.launch.command.command_line import SplitCommand

STATIC_PORT = 29_500
C10D_PORT = 29_400
"""torch's defaults: ``run`` in torch/distributed/run.py, DEFAULT_PORT in c10d_rendezvous_backend.py."""
SHAPE = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--master-addr", "--node-rank", "--standalone",
)  # fmt: skip
"""Options that each imply that torchrun starts ranks here."""
_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})


class TorchrunSettings:
    """The options of one torchrun by name, such as ``--nnodes``; the command line overrides the variables."""

    def __init__(self, words: tuple[str, ...], env: Mapping[str, str]) -> None:
        """Take torchrun's options and the environment that it will see."""
        self._words, self._env = words, env
        self._options = _read_options(words)

    def also(self, words: Iterable[str]) -> TorchrunSettings:
        """Return the settings with more options in front."""
        return TorchrunSettings((*words, *self._words), self._env)

    def text(self, name: str) -> str:
        """Return an option's value, or "" if neither it nor its variable is set."""
        return self._options.get(name) or self._env.get(variable_of(name), "").strip()

    def number(self, name: str) -> int | None:
        """Return an option's value as a non-negative integer, or None if it is not one."""
        text = self.text(name)
        return int(text) if text.isascii() and text.isdecimal() else None

    @property
    def nnodes(self) -> tuple[int, int] | None:
        """The fewest and the most nodes, or None if unset or invalid."""
        return nodes_range(self.text("--nnodes"))

    @property
    def standalone(self) -> bool:
        """Whether --standalone makes this node the whole job."""
        return "--standalone" in self._options or self.number("--standalone") not in {None, 0}

    @property
    def backend(self) -> str:
        """The rendezvous backend; the default is static."""
        return self.text("--rdzv-backend") or "static"

    @property
    def is_c10d(self) -> bool:
        """Whether the rendezvous numbers the nodes and one of them serves its store."""
        return self.backend == "c10d"

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """Host and port of the store that a node of the job serves, or None if none does (etcd)."""
        if self.backend not in {"static", "c10d"}:
            return None
        default = C10D_PORT if self.is_c10d else STATIC_PORT
        given = parse_endpoint(self.text("--rdzv-endpoint"), "--rdzv-endpoint")
        if given is not None:
            return given.host, given.port or default
        if self.is_c10d:
            return "localhost", default
        return self.text("--master-addr") or "127.0.0.1", self.number("--master-port") or default


def variable_of(option: str) -> str:
    """Return the environment variable of a torchrun option (torch/distributed/argparse_util.py)."""
    return "PET_" + option[2:].replace("-", "_").upper()


def settings_of_command(split: SplitCommand, env: Mapping[str, str]) -> TorchrunSettings | None:
    """Return torchrun's settings, given before a script or in the command itself.

    For another command, return the settings in an operator's PET_* variables, or None if they do not set the nodes.
    """
    if not split.is_command:
        return TorchrunSettings(split.torchrun, env)
    words = split.script_args
    if Path(split.script).name.startswith("python") and words[:1] == ("-m",) and set(words[1:2]) & _MODULES:
        words = words[2:]
    elif Path(split.script).name != "torchrun":
        return TorchrunSettings((), env) if env.get("PET_NNODES") else None
    try:
        # ``dict`` instead of asking torch about unknown options, which would delay the ranks by seconds.
        return TorchrunSettings(split_command(words, {}, dict).torchrun, env)
    except UserError:  # torchrun will complain about it
        return None


def _read_options(words: tuple[str, ...]) -> dict[str, str]:
    """Return each long option with its last value; flags have an empty one."""
    options: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, attached, value = word.partition("=")
        name = canonical(name)
        if not attached and TORCHRUN_OPTIONS.get(name, False):
            value = next(rest, "")
        options[name] = value
    return options
