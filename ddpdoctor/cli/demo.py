"""``ddpdoctor demo``: runs a tiny real job with a seeded fault under ``wrap``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli.options import LIST, Argument
from ddpdoctor.model.exit_status import ExitStatus

if TYPE_CHECKING:
    from ddpdoctor.launch.placement import WrapOptions

FAULTS = ("stuck", "crash", "killed", "early-exit", "mismatch", "exit-hang", "stopped", "input-bound")
"""The kinds of faults in the demo. Each is a script in ``cli/demos``."""
RANKS = {"mismatch": 3}
"""Ranks per fault. A majority needs three ranks. All other faults need only two."""
SLOW = ("input-bound",)
"""Faults that make a job slow. Their jobs run under ``wrap --speed``."""
HANG_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Run a small job with a fault and diagnose it.

    Takes less than 30 s. The exit status is 0 if the diagnosis names the fault, else 1.
    """

    fault: Annotated[str, Argument(metavar="FAULT", help="The fault; --list names them.")] = FAULTS[0]
    show_list: Annotated[bool, LIST.but(help="List the faults.")] = False


def run(options: Options) -> int:
    """Run the demo and return its exit status. Raises ``UserError``."""
    from ddpdoctor.cli.output import write
    from ddpdoctor.model.errors import UserError

    if options.show_list:
        width = max(map(len, FAULTS))
        write(sys.stdout, "".join(f"{name:<{width}}  {describe(name)}\n" for name in FAULTS))
        return ExitStatus.OK
    if options.fault not in FAULTS:
        raise UserError(f"there is no fault {options.fault}", help=f"Faults: {', '.join(FAULTS)}.")
    return _run(options.fault)


def read_script(fault: str) -> str:
    """Return the source of a fault's script."""
    from importlib.resources import files

    name = f"{fault.replace('-', '_')}.py"
    return (files("ddpdoctor.cli") / "demos" / name).read_text(encoding="utf-8")


def describe(fault: str) -> str:
    """Return the first line of the script's docstring."""
    return read_script(fault).split('"""')[1].splitlines()[0]


def _run(fault: str) -> int:
    from ddpdoctor.cli.output import say
    from ddpdoctor.cli.running import outcome_report, run_and_show

    ranks = RANKS.get(fault, 2)
    say(sys.stderr, f"running a job of {ranks} ranks with a seeded fault: {describe(fault)}")
    options = _make_options(fault, ranks)
    verdict = outcome_report(run_and_show(options)).verdict
    say(sys.stderr, f"the script and the report are in {options.report_dir.parent}")
    if verdict is not None and verdict.kind == fault:
        return ExitStatus.OK
    found = "no verdict" if verdict is None else f"the verdict {verdict.kind}"
    say(sys.stderr, f"the fault was {fault}, but the diagnosis is {found}")
    return ExitStatus.FOUND


def _make_options(fault: str, ranks: int) -> WrapOptions:
    from ddpdoctor.cli.wrap import Options as Wrapped
    from ddpdoctor.cli.wrap import prepare
    from ddpdoctor.launch.command_line import SplitCommand

    folder = _make_folder()
    script = folder / f"{fault.replace('-', '_')}.py"
    script.write_text(read_script(fault), encoding="utf-8")
    split = SplitCommand(
        own=(),
        torchrun=(f"--nproc-per-node={ranks}", f"--master-port={_find_port()}"),
        script=str(script),
        is_module=False,
        no_python=False,
        script_args=(),
    )
    wrapped = Wrapped(
        split=split, hang_timeout_s=HANG_TIMEOUT_S, on_hang="kill", report_dir=folder / "report", speed=fault in SLOW
    )
    options = prepare(wrapped, os.environ, command=("ddpdoctor", "demo", fault))
    return options if wrapped.speed else replace(options, debug_level="AUTO")


def _make_folder() -> Path:
    import tempfile

    from ddpdoctor.model.errors import UserError

    try:
        return Path(tempfile.mkdtemp(prefix="ddpdoctor-demo-"))
    except OSError as error:
        raise UserError(
            f"cannot make a temporary folder: {error.strerror}",
            help="Nothing was started. Set TMPDIR to another folder.",
        ) from error


def _find_port() -> int:
    """Find a port that is free now, so that the demo does not meet another job on torchrun's default port 29500."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
