"""Checks the script before anything starts: can it run, does it start ranks itself, and how many ranks to start."""

from __future__ import annotations

import ast
import shlex
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.launch.command.torchrun_nodes import TorchrunSettings
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.collect.gpus import GpuCount
    from ddpdoctor.launch.command.command_line import SplitCommand

RANKS_WITHOUT_GPU = 2
"""Our choice: fewer ranks cannot show problems between ranks, and more only share the same cores."""

_LAUNCHERS = frozenset(
    {
        "torch.multiprocessing.spawn",
        "torch.multiprocessing.start_processes",
        "torch.multiprocessing.spawn.spawn",
        "torch.multiprocessing.spawn.start_processes",
        "torch.distributed.elastic.multiprocessing.start_processes",
        "torch.distributed.elastic.multiprocessing.api.start_processes",
        "accelerate.notebook_launcher",
        "accelerate.launchers.notebook_launcher",
    }
)
"""Full names of functions that start ranks."""

LAUNCHERS = frozenset(
    {
        "accelerate", "bash", "deepspeed", "horovodrun", "lightning", "mpiexec", "mpirun", "poetry", "python",
        "python3", "sh", "srun", "torchrun", "uv",
    }
)  # fmt: skip
"""Commands that people mistakenly give as the script."""
_COMPILED_SUFFIXES = frozenset({".pyc", ".so"})


def check_script(script: str) -> bytes | None:
    """Return the source of a script, or None if it has none to read (a zip file, compiled code).

    Raises ``UserError`` if Python could not run it: not found, a directory, not readable, a syntax error.
    """
    path = Path(script)
    if path.is_dir():
        path /= "__main__.py"
        if not path.is_file():
            raise UserError(
                f"{script} is a directory, not a script", help="Give the file to run, or `-m` and a module's name."
            )
    if not path.exists():
        raise UserError(f"the script {script} was not found", help=f"Looked in {Path.cwd()}; check the path.")
    return _read_source(path)


def refuse_launcher(split: SplitCommand) -> None:
    """Raise ``UserError`` if the script is a command that starts ranks, which belongs after ``--``."""
    name = Path(split.script).name
    if name not in LAUNCHERS or Path(name).is_file():
        return
    words = [split.script, *(split.torchrun if name == "torchrun" else ()), *split.script_args]
    raise UserError(
        f"{split.script} is a command, not a training script",
        help=f"Put -- before it: `{shlex.join(['ddpdoctor', 'wrap', *split.own, '--', *words])}`",
    )


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
    aliases = _read_aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            written = _dotted(node.func)
            first, _, rest = written.partition(".")
            full = ".".join(part for part in (aliases.get(first, first), rest) if part)
            if full in _LAUNCHERS:
                return written
    return None


def choose_nproc(*, source: bytes | None, gpus: GpuCount) -> tuple[int, str]:
    """Choose the number of ranks; return it with a sentence on what was chosen and how to change it."""
    launcher = None if source is None else starts_ranks(source)
    how = "choose with --nproc-per-node"
    if launcher is not None:
        return 1, f"starting one process, because the script starts ranks itself with {launcher}; {how}"
    if gpus.unknown:
        return RANKS_WITHOUT_GPU, f"starting {RANKS_WITHOUT_GPU} ranks; {how}. GPUs are unknown: {gpus.unknown}"
    if gpus.count > 0:
        ranks = "1 rank, for the one GPU" if gpus.count == 1 else f"{gpus.count} ranks, one per GPU"
        return gpus.count, f"starting {ranks}; {how}"
    return RANKS_WITHOUT_GPU, f"starting {RANKS_WITHOUT_GPU} ranks, because no GPU was found; {how}"


def choose_ranks(
    torchrun_args: tuple[str, ...], source: bytes | None, env: Mapping[str, str]
) -> tuple[tuple[str, ...], str | None]:
    """Return the options to add for torchrun and a sentence about them; nothing if the user chose."""
    if TorchrunSettings(torchrun_args, env).text("--nproc-per-node"):
        return (), None
    from ddpdoctor.collect.gpus import count_gpus

    ranks, note = choose_nproc(source=source, gpus=count_gpus(env))
    return (f"--nproc-per-node={ranks}",), note


def _read_source(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"the script {path} cannot be read: {error.strerror}", help="Check its permissions.") from error
    if path.suffix in _COMPILED_SUFFIXES or zipfile.is_zipfile(path):
        return None
    _check_syntax(content, path)
    return content


def _check_syntax(content: bytes, path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(content, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UserError(
            f"syntax error at {path}:{error.lineno or 1}: {error.msg}", help="Nothing was started. Correct that line."
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not Python source: {error}", help="Nothing was started.") from error


def _read_aliases(tree: ast.AST) -> dict[str, str]:
    """Map each imported name in the whole file to its full name."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update({name.asname: name.name for name in node.names if name.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases.update({name.asname or name.name: f"{node.module}.{name.name}" for name in node.names})
    return aliases


def _dotted(node: ast.expr) -> str:
    """Return ``torch.multiprocessing.spawn`` as text, or "" if the node is not a plain chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])
