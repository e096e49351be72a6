"""Loads foreign code: torch, and the user's code, whose failures become a ``UserError``.

torch is imported so that neither its NCCL watchdog nor a call that holds the GIL forever ends or outlives the probe.
"""

from __future__ import annotations

import contextlib
import difflib
import faulthandler
import importlib
import os
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddpdoctor
from ddpdoctor.model.errors import ExitStatus, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
FORMER_HANDLING = "NCCL_ASYNC_ERROR_HANDLING"  # the older name, which torch still reads if the new one is not set
TORCHRUN, OF_TORCHRUN = "TORCHELASTIC_RUN_ID", "1"
OTHERS = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")
SHELL = "/bin/sh"
# Sleeps until the first line comes, which is faulthandler's "Timeout", or until the process ends without one.
READER = 'IFS= read -r line || exit 0; printf "%s\\n" "$1" >&2; exec cat >&2'
STDERR = 2
LAST_LIMIT_S = 5.0
FORM = "package.module:function"
_OURS = str(Path(ddpdoctor.__file__).parent) + os.sep
_NOT_THE_USERS = tuple(
    str(Path(folder).resolve()) + os.sep
    for folder in {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), _OURS}
)


def hold_watchdog(env: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set. Call it before torch is loaded: its threads read the environment."""
    by_torchrun = TORCHRUN in env and env.get(HANDLING) == OF_TORCHRUN
    if by_torchrun or (HANDLING not in env and FORMER_HANDLING not in env):
        env[HANDLING] = "0"
    for name in OTHERS:
        env.setdefault(name, "0")


def load_torch() -> None:
    """Import torch on a rank that may use NCCL. Raises ``UserError``."""
    hold_watchdog(os.environ)
    # torch reads this on import. Its C++ would only log peers that leave and names that do not resolve.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import_torch()


def import_torch() -> None:
    """Import torch with its distributed package. Raises ``UserError``."""
    try:
        import torch.distributed  # noqa: F401 - loaded for what follows
    except (ImportError, OSError) as error:
        advice = "`ddpdoctor check-env` shows what is wrong with it."
        raise UserError(f"torch cannot be imported: {error}", help=advice) from error


class Lifeline:
    """The timer of this process: prints ``words`` and all stacks, and ends it, unless ``put_off`` resets the timer."""

    def __init__(self, words: str) -> None:
        self._reader: subprocess.Popen[bytes] | None = None
        command = [SHELL, "-c", READER, SHELL, words]
        with contextlib.suppress(OSError):  # without a shell only the stacks are printed
            self._reader = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )

    def put_off(self, limit_s: float) -> None:
        stream = self._reader.stdin if self._reader is not None else STDERR
        assert stream is not None
        faulthandler.dump_traceback_later(limit_s, exit=True, file=stream)

    def release(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._reader is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reader.communicate(timeout=LAST_LIMIT_S)


def load_callable(name: str, option: str) -> Callable[..., Any]:
    """Return what ``option`` names, with the working directory on ``sys.path``. Raises ``UserError``."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or "/" in module_name or module_name.endswith(".py"):
        advice = f"Give a function that can be imported from here, as {FORM}."
        if module_name.endswith(".py"):
            dotted = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
            advice = f"Name the module, not its file: {dotted}:{attribute or 'function'}."
        raise UserError(f"{option} is {name!r}, which is not {FORM}", help=advice)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with users_turn(f"{option} {name}: the module cannot be imported"):
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing != module_name and not module_name.startswith(missing + "."):
                raise  # the module exists, but something that it imports does not
            places = f"{Path.cwd()} and on Python's path"
            advice = f"Modules are searched in {places}. Run the command in your project folder."
            raise UserError(f"{option} {name}: no module named {missing}", help=advice) from error
    owner = module_name
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            advice = f"Did you mean {near[0]}?" if near else ""
            raise UserError(f"{option} {name}: {owner} has no {part}", help=advice)
        found, owner = getattr(found, part), f"{owner}.{part}"
    if not callable(found):
        kind = type(found).__name__
        article = "an" if kind[:1].lower() in "aeiou" else "a"
        advice = f"Name a function that returns it: {FORM}."
        raise UserError(f"{option} {name} is {article} {kind}, not a function", help=advice)
    function: Callable[..., Any] = found
    return function


@contextlib.contextmanager
def users_turn(what: str, status: int = ExitStatus.WRONG_USE) -> Iterator[None]:
    """Run the user's code. Its stdout goes to stderr, and ``sys.argv`` hides our options from the user's parser.

    Whatever it raises becomes a ``UserError`` that begins with ``what``, with the error's last line and location.
    """
    former = sys.argv
    sys.argv = former[:1]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        if isinstance(error, SystemExit):
            said = f"it ended the process (SystemExit: {error.code})"
        else:
            lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
            first = next((line for line in lines if line), type(error).__name__)
            said = lines[-1] if isinstance(error, SyntaxError) else first
        raise UserError(f"{what}: {said}", help=_error_place(error), status=status) from error
    finally:
        sys.argv = former


def _error_place(error: BaseException) -> str:
    """Return the innermost line of the user's code, else the innermost line; "" if our call failed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_installed(frame.filename)]
    last = next(iter((own or frames)[-1:]), None)
    if last is None or last.filename.startswith(_OURS):
        return ""
    return f"at {last.filename}:{last.lineno} in {last.name}"


def is_installed(file: str) -> bool:
    """Return whether a file belongs to the interpreter, an installed package or ddpdoctor rather than to the user."""
    return file.startswith("<") or str(Path(file).resolve()).startswith(_NOT_THE_USERS)


def leaves(batch: Any, place: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a batch after its place: "batch[0]", "batch['labels']"."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, f"{place}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from leaves(value, f"{place}[{index}]")
    else:
        yield place, batch
