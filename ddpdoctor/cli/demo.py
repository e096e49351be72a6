"""``ddpdoctor demo``: a tiny real job with a seeded fault, run under ``wrap``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ddpdoctor.launch.command.options import WrapOptions

FAULTS = ("stuck", "crash", "killed", "early-exit", "mismatch", "exit-hang", "stopped")
"""The kinds that the demo can seed, each a script in ``cli/demos``."""
RANKS = {"mismatch": 3}
"""A majority needs three ranks; every other fault shows with two."""
HANG_TIMEOUT_S = 5.0
CHECK_EVERY = 50


def demo(
    fault: Annotated[str, typer.Argument(metavar="FAULT", help="What goes wrong; --list names the faults.")] = FAULTS[
        0
    ],
    show_list: Annotated[bool, typer.Option("--list", help="List the faults.")] = False,
) -> None:
    """Run a tiny real job with a seeded fault and diagnose it, in less than 30 s.

    The exit status is 0 where the diagnosis names the fault, else 1.
    """
    from ddpdoctor.cli.output import write
    from ddpdoctor.model.errors import UserError

    if show_list:
        width = max(map(len, FAULTS))
        write(sys.stdout, "".join(f"{name:<{width}}  {describe(name)}\n" for name in FAULTS))
        return
    if fault not in FAULTS:
        raise UserError(f"there is no fault {fault}", help=f"Faults: {', '.join(FAULTS)}.")
    raise typer.Exit(_run(fault))


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
    verdict = outcome_report(options, run_and_show(options)).verdict
    say(sys.stderr, f"script and report are kept in {options.report_dir.parent}")
    if verdict is not None and verdict.kind == fault:
        return 0
    found = "no verdict" if verdict is None else f"the verdict {verdict.kind}"
    say(sys.stderr, f"the seeded fault was {fault}, but the diagnosis came to {found}")
    return 1


def _make_options(fault: str, ranks: int) -> WrapOptions:
    import tempfile

    from ddpdoctor.cli.running import Request, prepare
    from ddpdoctor.launch.command.command_line import SplitCommand

    folder = Path(tempfile.mkdtemp(prefix="ddpdoctor-demo-"))
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
    request = Request(
        split=split,
        hang_timeout_s=HANG_TIMEOUT_S,
        on_hang="kill",
        debug_level="AUTO",
        report_dir=folder / "report",
        format="text",
        quiet=False,
        ignore=(),
        check_every=CHECK_EVERY,
        allow_different=(),
        exchange_port=None,
        command=("ddpdoctor", "demo", fault),
    )
    return prepare(request, os.environ)


def _find_port() -> int:
    """Find a port that is free now, so that a demo beside another job does not meet it on torchrun's 29500."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
