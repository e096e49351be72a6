"""What was typed: ddpdoctor's options, torchrun's, and the script or command, which is checked before the start."""

from __future__ import annotations

import ast
import difflib
import json
import re
import shlex
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ddpdoctor.collect.proc import safe_flags
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import nodes_range, parse_endpoint
from ddpdoctor.model.words import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddpdoctor.collect.gpus import GpuCount

ALIKE = 0.8  # our choice: an unknown option this similar to one of ours (difflib, 0 to 1) is that one, mistyped
ASK_TIMEOUT_S = 60.0  # importing torch takes a second or two; a cold network file system may need a minute
_WITH_VALUE = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf",
    "--max-restarts", "--monitor-interval", "--start-method", "--event-log-handler", "--role", "--log-dir", "-r",
    "--redirects", "-t", "--tee", "--local-ranks-filter", "--duplicate-stdout-filters",
    "--duplicate-stderr-filters", "--node-rank", "--master-addr", "--master-port", "--local-addr", "--logs-specs",
    "--numa-binding", "--signals-to-handle", "--shutdown-timeout",
)  # fmt: skip
_FLAGS = ("--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank")
# Each option, written with dashes, and whether it takes a value.
TORCHRUN_OPTIONS: Mapping[str, bool] = MappingProxyType(dict.fromkeys(_WITH_VALUE, True) | dict.fromkeys(_FLAGS, False))
# The environment variable of each long option (torch/distributed/argparse_util.py).
VARIABLES = {name: f"PET_{name[2:].replace('-', '_').upper()}" for name in TORCHRUN_OPTIONS if name.startswith("--")}
_ASK_TORCH = """
import json
from torch.distributed.run import get_args_parser
actions = get_args_parser()._actions
print(json.dumps({name: action.nargs != 0 for action in actions for name in action.option_strings}))
"""
HELP_OPTIONS = frozenset({"--help", "-h"})
USAGE = (
    "Give [OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]..., or [OPTIONS] -- COMMAND [ARGS]...; --help lists the options."
)
_MODULE = frozenset({"-m", "--module"})
_NO_PYTHON = "--no-python"
_SHORT_LENGTH = 2
STATIC_PORT = 29_500
C10D_PORT = 29_400  # torch's defaults: ``run`` in torch/distributed/run.py, DEFAULT_PORT in c10d_rendezvous_backend.py
# Options that each imply that torchrun starts ranks here.
SHAPE = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--master-addr", "--node-rank", "--standalone",
)  # fmt: skip
_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
RANKS_WITHOUT_GPU = 2  # our choice: fewer ranks cannot show problems between ranks, and more only share the same cores
# Full names of functions that start ranks.
_LAUNCHERS = re.compile(
    r"torch\.multiprocessing\.(spawn\.)?(spawn|start_processes)|accelerate\.(launchers\.)?notebook_launcher"
    r"|torch\.distributed\.elastic\.multiprocessing\.(api\.)?start_processes"
)
# Commands that people mistakenly give as the script.
LAUNCHERS = frozenset(
    {
        "accelerate", "bash", "deepspeed", "horovodrun", "lightning", "mpiexec", "mpirun", "poetry", "python",
        "python3", "sh", "srun", "torchrun", "uv",
    }
)  # fmt: skip
_COMPILED_SUFFIXES = frozenset({".pyc", ".so"})
# When to stop a job that hangs: once it can never continue (auto), at the first report (kill), never (report).
OnHang = Literal["auto", "kill", "report"]
DebugLevel = Literal["DETAIL", "INFO", "OFF"]
# AUTO means DETAIL if the job turns out to use only Gloo, and OFF if it uses NCCL or another backend.
ChosenLevel = Literal["AUTO", "DETAIL", "INFO", "OFF"]
OutputFormat = Literal["text", "json"]
# The last two apply only to reports of `allreduce-bench`.
SavedFormat = Literal["text", "json", "junit", "github", "sarif", "markdown", "html", "csv", "nccl-tests"]


@lru_cache(maxsize=1)
def ask_torchrun() -> Mapping[str, bool]:
    """Ask the installed torch, in a process of its own, for its options. Raises ``UserError`` if it cannot say."""
    command = [sys.executable, *safe_flags(), "-c", _ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True)
        answer: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        what = "cannot read torchrun's options: torch.distributed.run gave no answer"
        raise UserError(what, help=f"Run `{sys.executable} -m torch.distributed.run --help` to see why.") from error
    return {canonical(name): takes_value for name, takes_value in answer.items()}


def canonical(option: str) -> str:
    """Write a long option with dashes: ``--nproc_per_node`` as ``--nproc-per-node``."""
    return option.replace("_", "-") if option.startswith("--") else option


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCommand:
    """A command line of ``wrap``, split by owner; each part keeps the user's order and spelling.

    If ``is_command``, ``script`` is a command that runs unchanged and not under torchrun. ``torchrun`` does not contain
    the flags that ``is_module`` and ``no_python`` represent. In ``own``, long options are written with dashes.
    ``script`` is empty only if ``own`` asks for help.
    """

    own: tuple[str, ...] = ()
    torchrun: tuple[str, ...] = ()
    script: str = ""
    is_module: bool = False
    no_python: bool = False
    script_args: tuple[str, ...] = ()
    is_command: bool = False


def split_command(
    argv: Iterable[str], own_options: Mapping[str, bool], ask: Callable[[], Mapping[str, bool]] = ask_torchrun
) -> SplitCommand:
    """Split ``argv``; ``own_options`` maps each of ddpdoctor's options to whether it takes a value.

    The first word that is neither an option nor an option's value is the script, with all that follows. After ``--``
    comes a command. ``ask`` is called for an option that is in neither table. Raises ``UserError`` for a wrong use.
    """
    words = deque(argv)
    own: list[str] = []
    torchrun: list[str] = []
    is_module = no_python = False
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.popleft()
        if word == "--":
            if torchrun or is_module or no_python:
                given = next(iter(torchrun), "-m" if is_module else _NO_PYTHON)
                raise UserError(
                    f"{given} is an option of torchrun, but the command after `--` starts the ranks itself",
                    help="Leave out `--` to start a script under torchrun, or give torchrun as the command: "
                    "`ddpdoctor wrap -- torchrun OPTIONS SCRIPT`.",
                )
            if not words:
                raise UserError("no command to run was given after `--`", help=USAGE)
            return SplitCommand(own=tuple(own), script=words[0], script_args=tuple(words)[1:], is_command=True)
        if word in HELP_OPTIONS:
            return SplitCommand(own=("--help",), torchrun=tuple(torchrun), is_module=is_module, no_python=no_python)
        given, equals, value = word.partition("=")
        is_long = given.startswith("--")
        name = _complete(canonical(given), own_options) if is_long else word[:_SHORT_LENGTH]
        given = name if is_long and name != canonical(given) else given
        is_own = name in own_options
        known = own_options if is_own else TORCHRUN_OPTIONS
        if name not in known:
            near = difflib.get_close_matches(name, own_options, 1, ALIKE) if is_long else []
            known = {} if near else ask()
            if name not in known:
                what = f"neither ddpdoctor nor torchrun has the option {given}"
                raise UserError(what, help=f"Did you mean {near[0]}?" if near else USAGE)
        takes_value = known[name]
        has_value = bool(equals) if is_long else len(word) > _SHORT_LENGTH  # --tee=3, -t3
        if has_value and not takes_value:
            raise UserError(f"the option {name} takes no value, but got one: {given}{equals}{value}", help=USAGE)
        if name in _MODULE:
            is_module = True
        elif name == _NO_PYTHON:
            no_python = True
        else:
            kept = own if is_own else torchrun
            kept.append(f"{name if is_own else given}{equals}{value}")
            if takes_value and not has_value:
                if not words:
                    raise UserError(f"the option {name} needs a value", help=USAGE)
                kept.append(words.popleft())
    if not words:
        raise UserError("no script to run was given", help=USAGE)
    return SplitCommand(
        own=tuple(own), torchrun=tuple(torchrun), script=words.popleft(), is_module=is_module, no_python=no_python,
        script_args=tuple(words),
    )  # fmt: skip


def _complete(name: str, own_options: Mapping[str, bool]) -> str:
    """Expand an abbreviated long option, as argparse does for torchrun, or return ``name`` if nothing matches."""
    known = {*own_options, *TORCHRUN_OPTIONS}
    if name in known:
        return name
    meant = sorted(option for option in known if option.startswith(name))
    if len(meant) > 1:
        raise UserError(f"the option {name} could be {' or '.join(meant)}", help="Write it out.")
    return meant[0] if meant else name


class TorchrunSettings:
    """The options of one torchrun by name, such as ``--nnodes``; the command line overrides the variables."""

    def __init__(self, words: tuple[str, ...], env: Mapping[str, str]) -> None:
        self.words, self.env = words, env
        self.given: dict[str, str] = {}  # each long option with its last value; flags have an empty one
        rest = iter(words)
        for word in rest:
            name, attached, value = word.partition("=")
            name = canonical(name)
            if not attached and TORCHRUN_OPTIONS.get(name, False):
                value = next(rest, "")
            self.given[name] = value
        # The value of each option with one, or "" if neither the option nor its variable is set.
        given = self.given
        self.texts = {name: given.get(name) or env.get(variable, "").strip() for name, variable in VARIABLES.items()}
        text = self.texts["--nnodes"]
        self.nnodes = nodes_range(text) if text else None  # the fewest and the most; None if unset or invalid

    def number(self, name: str) -> int | None:
        """Return an option's value as a non-negative integer, or None if it is not one."""
        text = self.texts[name]
        return int(text) if text.isascii() and text.isdecimal() else None

    @property
    def backend(self) -> str:
        return self.texts["--rdzv-backend"] or "static"

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
        given = parse_endpoint(self.texts["--rdzv-endpoint"], "--rdzv-endpoint")
        if given is not None:
            return given.host, given.port or default
        if self.is_c10d:
            return "localhost", default
        return self.texts["--master-addr"] or "127.0.0.1", self.number("--master-port") or default


def settings_of_command(split: SplitCommand, env: Mapping[str, str]) -> TorchrunSettings | None:
    """Return torchrun's settings. Those of another command are an operator's PET_* variables, if they set nodes."""
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


def check_script(script: str) -> bytes | None:
    """Return a script's source, or None (a zip file, compiled code). Raises ``UserError`` if Python cannot run it."""
    path = Path(script)
    if path.is_dir():
        path /= "__main__.py"
        if not path.is_file():
            what = f"{script} is a directory, not a script"
            raise UserError(what, help="Give the file to run, or `-m` and a module's name.")
    if not path.exists():
        raise UserError(f"the script {script} was not found", help=f"Looked in {Path.cwd()}; check the path.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"the script {path} cannot be read: {error.strerror}", help="Check its permissions.") from error
    if path.suffix in _COMPILED_SUFFIXES or zipfile.is_zipfile(path):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(content, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        what = f"syntax error at {path}:{error.lineno or 1}: {error.msg}"
        raise UserError(what, help="Nothing was started. Correct that line.") from error
    except ValueError as error:
        raise UserError(f"{path} is not Python source: {error}", help="Nothing was started.") from error
    return content


def read_source(split: SplitCommand, env: Mapping[str, str]) -> bytes | None:
    """Check what is to run; return the script's source, or None if there is none to find. Raises ``UserError``."""
    if split.is_command or split.no_python:
        check_command(split.script, env.get("PATH"))
        return None
    if split.is_module:
        found = locate_module(split.script, ("", *sys.path))
        return None if found is None else check_script(str(found))
    name = Path(split.script).name
    if name in LAUNCHERS and not Path(name).is_file():
        words = [split.script, *(split.torchrun if name == "torchrun" else ()), *split.script_args]
        what = f"{split.script} is a command, not a training script"
        raise UserError(what, help=f"Put -- before it: `{shlex.join(['ddpdoctor', 'wrap', *split.own, '--', *words])}`")
    return check_script(split.script)


def check_command(command: str, path: str | None) -> None:
    """Raise ``UserError`` if ``command`` cannot be run; ``path`` is the value of PATH."""
    if shutil.which(command, path=path) is not None:
        return
    file = Path(command)
    if file.is_file() and file.suffix == ".py":
        raise UserError(
            f"{command} is a script that is not executable",
            help=f"To start its ranks with torchrun: `ddpdoctor wrap {command}`. To run it in one process: "
            f"`ddpdoctor wrap -- python {command}`.",
        )
    if file.is_file() and "/" in command:
        raise UserError(f"the command {command} is not executable", help=f"Try `ddpdoctor wrap -- bash {command}`.")
    looked = "check the path" if "/" in command else "it is not on PATH"
    raise UserError(f"the command {command} was not found", help=f"Nothing was started; {looked}.")


def locate_module(name: str, search_path: Iterable[str]) -> Path | None:
    """Find the file that ``python -m name`` would run, without importing anything, or None if that fails."""
    for root in search_path:
        base = Path(root or ".").joinpath(*name.split("."))
        for candidate in (base / "__main__.py", base.with_name(base.name + ".py")):
            if candidate.is_file():
                return candidate
    return None


def starts_ranks(source: bytes) -> str | None:
    """Return the call by which a script starts ranks itself, as written there, or None if it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update({name.asname: name.name for name in node.names if name.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases.update({name.asname or name.name: f"{node.module}.{name.name}" for name in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            parts, function = [], node.func
            while isinstance(function, ast.Attribute):
                parts.append(function.attr)
                function = function.value
            if not isinstance(function, ast.Name):
                continue
            written = ".".join([function.id, *reversed(parts)])
            first, _, rest = written.partition(".")
            full = ".".join(part for part in (aliases.get(first, first), rest) if part)
            if _LAUNCHERS.fullmatch(full):
                return written
    return None


def choose_nproc(*, source: bytes | None, gpus: GpuCount, without_gpu: int = RANKS_WITHOUT_GPU) -> tuple[int, str]:
    """Choose the number of ranks; return it with the option that would choose the same, and why."""
    launcher = None if source is None else starts_ranks(source)
    ranks, why = without_gpu, f"GPUs unknown: {gpus.unknown}" if gpus.unknown else "no GPU"
    if launcher is not None:
        ranks, why = 1, f"the script starts ranks with {launcher}"
    elif not gpus.unknown and gpus.count > 0:
        ranks, why = gpus.count, count_of(gpus.count, "GPU")
    return ranks, f"--nproc-per-node {ranks} ({why})"


def choose_ranks(
    torchrun_args: tuple[str, ...], source: bytes | None, env: Mapping[str, str]
) -> tuple[tuple[str, ...], str | None]:
    """Return the options to add for torchrun and a sentence about them; nothing if the user chose."""
    if TorchrunSettings(torchrun_args, env).texts["--nproc-per-node"]:
        return (), None
    from ddpdoctor.collect.gpus import count_gpus

    ranks, note = choose_nproc(source=source, gpus=count_gpus(env))
    return (f"--nproc-per-node={ranks}",), note
