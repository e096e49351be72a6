"""``ddpdoctor bundle``: packs the report of a run, without secrets and names, into one archive to share."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli.options import OUTPUT, RUN_DIR, Option
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.report.lines import clean

if TYPE_CHECKING:
    from ddpdoctor.diagnose.bundle import Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Pack a run's report into one archive, without secrets and names.

    Shows what is in the archive, and asks before writing it. `ddpdoctor report` opens it on any machine.
    """

    run_dir: Annotated[Path | None, RUN_DIR] = None
    output: Annotated[Path | None, OUTPUT.but(help="The archive.  [default: ddpdoctor-bundle-<run>.zip]")] = None
    with_source: Annotated[bool, Option(help="Keep the lines of your source around the fault.")] = False
    yes: Annotated[bool, Option(help="Write the archive without asking.")] = False


def run(options: Options) -> int:
    from ddpdoctor.cli.output import check_writable, render, say, write
    from ddpdoctor.cli.report import RUNS, find_latest, read_run
    from ddpdoctor.diagnose.bundle import PAGE_FILE, REPORT_FILE, make_bundle, pack

    path = options.run_dir or find_latest(Path(RUNS))
    folder = path.resolve()
    name = folder.parent.name if folder.is_file() else folder.name
    output = options.output or Path(f"ddpdoctor-bundle-{name}.zip")
    check_writable(output, "--output")
    users = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER")]
    bundle = make_bundle(read_run(path), users, with_source=options.with_source)
    files = {REPORT_FILE: render(bundle.report, "json"), PAGE_FILE: render(bundle.report, "html")}
    write(sys.stdout, _describe_archive(bundle, files, path, output))
    from ddpdoctor.recorder.storage.files import write_whole

    if not options.yes:
        if not sys.stdin.isatty():
            raise UserError("nothing was written: cannot ask for consent", help="Give --yes to write it.")
        sys.stdout.write("write it? [y/N] ")
        sys.stdout.flush()
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            say(sys.stderr, "nothing was written")
            return ExitStatus.OK
    try:
        write_whole(output, pack(files))
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}", help="Choose another file.") from error
    write(sys.stdout, f"written: {output}\nopen it with: ddpdoctor report {output}\n")
    return ExitStatus.OK


def _describe_archive(bundle: Bundle, files: dict[str, str], path: Path, output: Path) -> str:
    """List what the archive holds, what was replaced in it, and what stays here."""
    from ddpdoctor.model.words import format_size

    lines = [f"{output} will hold"]
    lines += [f"  {name:<12}  {format_size(len(text.encode()))}" for name, text in files.items()]
    lines += ["replaced in it", *(f"  {text}" for text in bundle.hidden), "not in it"]
    lines += [f"  {text}" for text in bundle.left_out]
    if path.is_dir():
        others = sorted(child.name + "/" * child.is_dir() for child in path.iterdir() if child.name != "report.json")
        lines += [f"  {clean(name)}" for name in others]
    return "\n".join(lines) + "\n"
