"""DD115: errors in the files from which NCCL reads variables."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import need
from ddpdoctor.model.software import release
from ddpdoctor.model.variables import find_variable
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.variable_flaws import (
    Flaw,
    find_danger,
    find_deprecated,
    find_too_new,
    find_unknown,
    find_wrong_value,
    read_context,
    show,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.model.node import ConfFile, Node
    from ddpdoctor.rules.variable_dangers import VariableContext

QUESTIONS = (find_wrong_value, find_deprecated, find_danger, find_too_new)


@rule(
    "DD115", "nccl-conf", Severity.WARNING, "An NCCL configuration file has a wrong setting",
    group=CheckGroup.VARIABLES, needs=("conf_files", "software", "rdma"),
    reads="/etc/nccl.conf, ~/.nccl.conf, the file in NCCL_CONF_FILE",
)  # fmt: skip
def check_nccl_conf(node: Node) -> Answer:
    """Report errors in NCCL's files, which set variables that do not show in the environment."""
    files = need(node.conf_files)
    if not files:
        return skipped("there is no /etc/nccl.conf or ~/.nccl.conf, and NCCL_CONF_FILE is not set")
    context = read_context(node, node.first)
    problems = [problem for file in files for problem in _judge_file(file, context)]
    return judged(problems, "; ".join(_describe(file) for file in files))


def _describe(file: ConfFile) -> str:
    if file.unread:
        return f"{file.path} cannot be read"
    names = ", ".join(file.variables) or "nothing"
    return f"{file.path} sets {names}"


def _judge_file(file: ConfFile, context: VariableContext) -> Iterator[Problem]:
    reason = file.unread or _passed_over(file, context)
    if reason:
        yield _unread_problem(file, reason)
        return
    if file.bad_lines:
        yield _bad_lines(file)
    if file.repeated_lines:
        yield _repeated_lines(file)
    for name, value in file.variables.items():
        if name not in (*file.hidden_by_env, *file.hidden_by_file):
            yield from (_flaw_problem(file, flaw) for flaw in _flaws(name, value, context))


def _flaws(name: str, value: str, context: VariableContext) -> Iterator[Flaw]:
    variable = find_variable(name)
    if variable is None:
        flaw = find_unknown(name, context)
        yield from [] if flaw is None else [flaw]
        return
    found = (question(variable, value, context) for question in QUESTIONS if variable.shown)
    yield from (flaw for flaw in found if flaw is not None)


def _passed_over(file: ConfFile, context: VariableContext) -> str:
    """Return why the installed NCCL skips this file, or "" if it reads the file or its version is not known."""
    installed = context.versions.get("nccl", ())
    if installed and file.since and installed < release(file.since):
        return f"before {file.since}, it uses the home folder from the password database, not HOME"
    if installed and file.until and installed > release(file.until):
        return f"after {file.until}, it uses HOME, not the home folder from the password database"
    return ""


def _unread_problem(file: ConfFile, reason: str) -> Problem:
    names = ", ".join(f"{name}={show(value)}" if value else name for name, value in file.variables.items())
    path = shlex.quote(file.path)
    return Problem(
        summary=f"NCCL does not read {file.path}: {reason}",
        evidence=(f"it sets {names}",) if names else ("NCCL does not report this",),
        fix=f"export NCCL_CONF_FILE={path}" if names else f"ls -l {path}, or unset NCCL_CONF_FILE",
    )


def _bad_lines(file: ConfFile) -> Problem:
    mend = r"s/^\s*(export\s+)?//; {}s/\s*=\s*/=/"
    return Problem(
        summary=f"{_lines(file.bad_lines)} of {file.path} is not NAME=VALUE from the first column, so it has no effect",
        evidence=("NCCL does not report lines that it cannot read",),
        fix=_sed("-i -E", (f"{line}{mend.format(line)}" for line in file.bad_lines), file),
    )


def _repeated_lines(file: ConfFile) -> Problem:
    return Problem(
        summary=f"{_lines(file.repeated_lines)} of {file.path} repeats an earlier setting, so it has no effect",
        evidence=("if two lines have the same name, NCCL uses the first",),
        fix=_sed("-i", (f"{line}d" for line in file.repeated_lines), file),
    )


def _lines(numbers: tuple[int, ...]) -> str:
    return f"line {numbers[0]}" if len(numbers) == 1 else f"each of the lines {', '.join(map(str, numbers))}"


def _sed(options: str, commands: Iterable[str], file: ConfFile) -> str:
    return f"sed {options} '{'; '.join(commands)}' {shlex.quote(file.path)}"


def _flaw_problem(file: ConfFile, flaw: Flaw) -> Problem:
    return Problem(
        summary=flaw.summary,
        evidence=(_origin(file, flaw.name), *flaw.evidence),
        fix=_write_fix(file, flaw),
        severity=flaw.severity,
        confidence=flaw.confidence,
    )


def _origin(file: ConfFile, name: str) -> str:
    value = file.variables[name]
    setting = f"{name}={show(value)}" if value else name
    return f"{setting} is in line {file.lines.get(name, 0)} of {file.path}; the environment does not show it"


def _write_fix(file: ConfFile, flaw: Flaw) -> str:
    """Return the command that changes or deletes the line."""
    line, path = file.lines.get(flaw.name, 0), shlex.quote(file.path)
    if not flaw.set_name:
        return f"sed -i {line}d {path}"
    if flaw.set_name == flaw.name:
        text = f"{line}c\\{flaw.name}={flaw.set_value}"
        return f"sed -i {shlex.quote(text)} {path}"
    return f"sed -i '{line}s/^[^=]*/{flaw.set_name}/' {path}"
