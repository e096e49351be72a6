"""DD111 to DD116, DD234 and DD235: variables that are wrong, harmful, or not the same everywhere; NCCL's files."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.launch import find_variable, is_loopback, parse_endpoint, read_variables, text_of
from ddpdoctor.model.node import release
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.words import count_of, first_names
from ddpdoctor.rules import variables as var
from ddpdoctor.rules.answers import Answer, Problem, found, judged, skipped
from ddpdoctor.rules.environment.launch import ranks_of, show_variables
from ddpdoctor.rules.majority import Split, Voice, compare, describe, disagreement
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpdoctor.model.launch import Variable
    from ddpdoctor.model.node import ConfFile, Fleet, Node, NodeProcess


MOST_SHOWN = 6
# Components whose variables are not listed as checked, because a launcher sets dozens of them.
OF_THE_LAUNCH = frozenset({"slurm", "k8s", "mpi", "launcher", "build", "loader", "network"})


@rule(
    "DD111", "env-unknown", Severity.WARNING, "A variable is set but nothing reads it",
    group=CheckGroup.VARIABLES, needs=("software",), reads="names of environment variables, NCCL's version",
)  # fmt: skip
def check_env_unknown(node: Node) -> Answer:
    """Report variables that look like those of NCCL, torch, Gloo or torchrun, but that none of them reads."""
    others = sorted({name for process in node.processes for name in process.other_names})
    strangers = f"and {', '.join(others)}" if others else "and no similar names"
    names = {variable.name for process in node.processes for variable, _ in _known_variables(process)}
    count = count_of(len(names), "known variable") if names else "no known variables"
    return judged(_flaw_problems(node, var.find_too_new, unknown=True), f"{count} {strangers}")


@rule(
    "DD112", "env-value", Severity.WARNING, "A variable has an invalid value",
    group=CheckGroup.VARIABLES, needs=(), reads="environment variables of NCCL, torch, Gloo, CUDA and OpenMP",
)  # fmt: skip
def check_env_value(node: Node) -> Answer:
    """Report variables whose value has the wrong form."""
    return judged(_flaw_problems(node, var.find_wrong_value), _shown_settings(node))


@rule(
    "DD113", "env-deprecated", Severity.WARNING, "A variable is obsolete",
    group=CheckGroup.VARIABLES, needs=("software",), reads="environment variables, versions of torch and NCCL",
)  # fmt: skip
def check_env_deprecated(node: Node) -> Answer:
    """Report variables that have a new name, that are no longer read, or that never existed."""
    return judged(_flaw_problems(node, var.find_deprecated), _shown_settings(node))


@rule(
    "DD114", "env-danger", Severity.WARNING, "A variable slows down jobs or hides faults",
    group=CheckGroup.VARIABLES, needs=("rdma",), reads="environment variables",
)  # fmt: skip
def check_env_danger(node: Node) -> Answer:
    """Report variables with a harmful value, most often left over from debugging."""

    def danger(variable: Variable, value: str, context: var.VariableContext) -> var.Flaw | None:
        is_left_out = variable.name == "NCCL_IB_DISABLE" and context.active_port  # see ib-disabled
        return None if is_left_out else var.find_danger(variable, value, context)

    return judged(_flaw_problems(node, danger), _shown_settings(node))


def _known_variables(process: NodeProcess) -> list[tuple[Variable, str]]:
    found = ((find_variable(name), value) for name, value in process.variables.items())
    return [(variable, value) for variable, value in found if variable is not None]


def _flaw_problems(
    node: Node, question: Callable[[Variable, str, var.VariableContext], var.Flaw | None], *, unknown: bool = False
) -> Iterator[Problem]:
    """Check every listed variable for one kind of flaw, after looking for unknown names if requested."""
    for process in node.processes:
        context = var.read_context(node, process)
        flaws = [var.find_unknown(name, context) for name in process.other_names] if unknown else []
        flaws += [question(variable, value, context) for variable, value in _known_variables(process)]
        for flaw in flaws:
            if flaw is None:
                continue
            origin = f"{flaw.name} is set in the environment; its value is not shown"
            if flaw.name in process.variables:
                origin = f"{flaw.name}={var.show(process.variables[flaw.name])} is set in the environment"
            name = flaw.name
            if not name.isidentifier() or not name.isascii():
                fix = f"remove {shlex.quote(name)} from the environment, for example with env -u {shlex.quote(name)}"
            elif not flaw.set_name:
                fix = f"unset {name}"
            elif flaw.set_name == name:
                fix = f"export {name}={shlex.quote(flaw.set_value or '')}"
            else:
                fix = f'export {flaw.set_name}="${name}"; unset {name}'
            yield _flaw_problem(flaw, origin, fix, ranks_of([process]))


def _flaw_problem(flaw: var.Flaw, origin: str, fix: str, ranks: tuple[int, ...] = ()) -> Problem:
    return Problem(
        summary=flaw.summary, evidence=(origin, *flaw.evidence), fix=fix, severity=flaw.severity,
        confidence=flaw.confidence, ranks=ranks,
    )  # fmt: skip


def _shown_settings(node: Node) -> str:
    """Return some of the settings that were checked, with those of NCCL, torch and Gloo first."""
    settings = {
        f"{variable.name}={var.show(value)}": (variable.component not in {"nccl", "torch", "gloo"}, variable.name)
        for process in node.processes
        for variable, value in _known_variables(process)
        if variable.component not in OF_THE_LAUNCH and not variable.name.startswith("TORCHELASTIC_")
    }
    names = sorted(settings, key=lambda text: settings[text])
    return first_names(names, MOST_SHOWN) or "no variable of NCCL, torch, Gloo, CUDA or OpenMP is set"


QUESTIONS = (var.find_wrong_value, var.find_deprecated, var.find_danger, var.find_too_new)


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
    context = var.read_context(node, node.first)
    problems = [problem for file in files for problem in _judge_file(file, context)]
    seen = (
        f"{file.path} cannot be read" if file.unread else f"{file.path} sets {', '.join(file.variables) or 'nothing'}"
        for file in files
    )
    return judged(problems, "; ".join(seen))


def _judge_file(file: ConfFile, context: var.VariableContext) -> Iterator[Problem]:
    reason, installed = file.unread, context.versions.get("nccl", ())
    if not reason and installed and file.since and installed < release(file.since):
        reason = f"before {file.since}, it uses the home folder from the password database, not HOME"
    elif not reason and installed and file.until and installed > release(file.until):
        reason = f"after {file.until}, it uses HOME, not the home folder from the password database"
    if reason:
        names = ", ".join(f"{name}={var.show(value)}" if value else name for name, value in file.variables.items())
        path = shlex.quote(file.path)
        yield Problem(
            summary=f"NCCL does not read {file.path}: {reason}",
            evidence=(f"it sets {names}",) if names else ("NCCL does not report this",),
            fix=f"export NCCL_CONF_FILE={path}" if names else f"ls -l {path}, or unset NCCL_CONF_FILE",
        )
        return
    if file.bad_lines:
        mend = r"s/^\s*(export\s+)?//; {}s/\s*=\s*/=/"
        form = "is not NAME=VALUE from the first column, so it has no effect"
        fix = _sed("-i -E", (f"{line}{mend.format(line)}" for line in file.bad_lines), file)
        evidence = ("NCCL does not report lines that it cannot read",)
        yield Problem(summary=f"{_line_words(file.bad_lines)} of {file.path} {form}", evidence=evidence, fix=fix)
    if file.repeated_lines:
        summary = f"{_line_words(file.repeated_lines)} of {file.path} repeats an earlier setting, so it has no effect"
        evidence = ("if two lines have the same name, NCCL uses the first",)
        fix = _sed("-i", (f"{line}d" for line in file.repeated_lines), file)
        yield Problem(summary=summary, evidence=evidence, fix=fix)
    for name, value in file.variables.items():
        if name in (*file.hidden_by_env, *file.hidden_by_file):
            continue
        variable = find_variable(name)
        if variable is None:
            flaws = [var.find_unknown(name, context)]
        else:
            flaws = [question(variable, value, context) for question in QUESTIONS if variable.shown]
        line, path, setting = file.lines.get(name, 0), shlex.quote(file.path), f"{name}={var.show(value)}"
        origin = f"{setting if value else name} is in line {line} of {file.path}; the environment does not show it"
        for flaw in flaws:
            if flaw is None:
                continue
            if not flaw.set_name:
                fix = f"sed -i {line}d {path}"
            elif flaw.set_name == name:
                text = f"{line}c\\{name}={flaw.set_value}"
                fix = f"sed -i {shlex.quote(text)} {path}"
            else:
                fix = f"sed -i '{line}s/^[^=]*/{flaw.set_name}/' {path}"
            yield _flaw_problem(flaw, origin, fix)


def _line_words(numbers: tuple[int, ...]) -> str:
    return f"line {numbers[0]}" if len(numbers) == 1 else f"each of the lines {', '.join(map(str, numbers))}"


def _sed(options: str, commands: Iterable[str], file: ConfFile) -> str:
    return f"sed {options} '{'; '.join(commands)}' {shlex.quote(file.path)}"


PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@rule(
    "DD116", "proxy-env", Severity.INFO, "A proxy is between the ranks and their etcd rendezvous",
    group=CheckGroup.VARIABLES, needs=(),
    reads="http_proxy, https_proxy, no_proxy, PET_RDZV_BACKEND, PET_RDZV_ENDPOINT",
)  # fmt: skip
def check_proxy_env(node: Node) -> Answer:
    """Report an HTTP proxy whose exceptions do not name the host of the etcd rendezvous."""
    process = node.first
    if not process.variables.get("PET_RDZV_BACKEND", "").startswith("etcd"):
        return skipped("PET_RDZV_BACKEND is not etcd, and no other rendezvous uses HTTP")
    proxies = [name for name in PROXIES if process.variables.get(name)]
    named = (parse_endpoint(process.variables.get(name, ""), name) for name in ("PET_RDZV_ENDPOINT", "MASTER_ADDR"))
    host = next((endpoint.host for endpoint in named if endpoint is not None), "")
    if not proxies or not host:
        return judged([], "no proxy is set" if host else "no rendezvous host is set")
    exceptions = ",".join(process.variables.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    domains = [domain.strip().lower().lstrip(".") for domain in exceptions.split(",") if domain.strip()]
    if any(domain == "*" or host.lower() == domain or host.lower().endswith(f".{domain}") for domain in domains):
        return judged([], f"no_proxy includes {host}")
    summary = f"{proxies[0]} is set, but no_proxy does not include {host}, the etcd rendezvous host"
    fix = f'export no_proxy="${{no_proxy:+$no_proxy,}}{host}"; export NO_PROXY="$no_proxy"'
    evidence = (f"{', '.join(proxies)} set, no_proxy={var.show(process.variables.get('no_proxy', ''))}",)
    return found(summary, f"{proxies[0]} without an exception for {host}", evidence=evidence, fix=fix)


WORLD = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Each rank chooses the algorithm and protocol of a collective from its own variables. Ranks that choose differently
# wait for each other.
HANG = frozenset({"NCCL_ALGO", "NCCL_PROTO"})
RENDEZVOUS = (
    "TORCHELASTIC_RUN_ID", "PET_RDZV_ID", "PET_NNODES", "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)  # fmt: skip
UNSET = ""
MANY_SIDES = 4  # Up to this many different values are all shown. If there are more, only the first two are.


@rule(
    "DD234", "ws-same", Severity.WARNING, "A variable differs between ranks but must be equal",
    after=("rdzv-id-same",),
    group=CheckGroup.LAUNCH, needs=("names", "conf_files"),
    reads="WORLD_SIZE, MASTER_ADDR, MASTER_PORT, variables of NCCL and torch that must agree, NCCL's files",
)  # fmt: skip
def check_ws_same(fleet: Fleet) -> Answer:
    """Report variables on which the ranks disagree, and which ranks differ from the majority."""
    processes = list(fleet.processes())
    if not fleet.gathered:
        return skipped("no launcher was seen, so there is only one process")
    if len(processes) < 2:
        return skipped("only one process answered")
    agreed = {name for name, variable in read_variables().items() if variable.agree}
    names = (*WORLD, *sorted(agreed - set(WORLD)))
    splits = {name: compare(_voice(node, process, name) for node, process in processes) for name in names}
    files = [(node.host, file) for node in fleet.nodes for file in known(node.conf_files) or ()]
    problems = []
    for name, split in splits.items():
        values = {side.value for side in split.sides} if split is not None else set()
        if split is None or (name == "MASTER_ADDR" and _same_host(fleet, values - {UNSET})):
            continue
        severity = Severity.ERROR if name in WORLD or name in HANG else Severity.WARNING
        if name == "TORCH_DISTRIBUTED_DEBUG":
            severity = Severity.ERROR if "DETAIL" in {value.upper() for value in values} else Severity.INFO
        if name == "WORLD_SIZE":
            consequence = "the ranks wait for different numbers of ranks"
        elif name in WORLD:
            consequence = "the ranks look for different stores"
        elif name in HANG:
            consequence = "ranks that choose differently hang in a collective"
        else:
            consequence = "it must be the same on all ranks"
        summary = f"{_who_has_what(name, split, by_rank=True)}: {consequence}"
        evidence = tuple(f"{file.path} of {host} sets {name}" for host, file in files if name in file.variables)
        fix, ranks = _export_fix(name, split), split.ranks
        problems.append(disagreement(split, summary, fix, evidence=evidence, severity=severity, ranks=ranks))
    world = show_variables(processes[0][1], WORLD)
    return judged(problems, f"{len(names)} variables of {len(processes)} ranks" + (f"; {world}" if world else ""))


def _voice(node: Node, process: NodeProcess, name: str) -> Voice[str]:
    """Return a rank's value of a variable. A value that NCCL reads from a file counts as set."""
    value = text_of(process, name)
    if not value and name.startswith("NCCL_"):
        files = known(node.conf_files) or ()
        value = next((file.variables[name] for file in files if file.variables.get(name)), UNSET)
    ranks = (process.rank,) if process.rank is not None else ()
    return Voice(host=node.host, ranks=ranks, value=value)


def _who_has_what(name: str, split: Split[str], *, by_rank: bool) -> str:
    def word(value: str) -> str:
        return value or "unset"

    sides = len(split.sides)
    if sides <= MANY_SIDES:
        return describe(split, name, words=word, by_rank=by_rank, sign=" is ")
    some = replace(split, majority=None, minorities=split.minorities[:2])
    return f"{name} has {sides} different values, {describe(some, 'such as', words=word, by_rank=by_rank)}"


def _export_fix(name: str, split: Split[str], everywhere: str = "ranks") -> str:
    majority = split.majority.value if split.majority is not None else None
    if majority == UNSET:
        return f"unset {name} on all {everywhere}"
    value = majority or next(side.value for side in reversed(split.minorities) if side.value)
    return f"export {name}={value} on all {everywhere}"


def _same_host(fleet: Fleet, spellings: set[str]) -> bool:
    """Say whether all spellings of MASTER_ADDR resolve to one host. Each host resolves only its own spelling."""
    if len(spellings) < 2:
        return False
    first = fleet.nodes[0]
    own = known(first.names)
    called = {first.host, *((own.hostname, own.fqdn, *own.own.addresses) if own is not None else ())}
    given = [(node, text_of(process, "MASTER_ADDR")) for node, process in fleet.processes()]
    if all(host in called or (node is first and is_loopback(host)) for node, host in given):
        return True  # localhost on the first node, or the first node's name on any node
    found: list[set[str]] = []
    for node, host in given:
        names = known(node.names)
        if names is None or names.master is None or names.master.name != host:
            return False
        found.append(set(names.master.addresses))
    return bool(set.intersection(*found))


@rule(
    "DD235", "rdzv-id-same", Severity.ERROR, "Nodes have different rendezvous settings",
    after=("port-free", "tcp-store"),
    group=CheckGroup.LAUNCH, needs=(), reads="TORCHELASTIC_RUN_ID, PET_RDZV_ID, PET_NNODES, PET_RDZV_ENDPOINT",
)  # fmt: skip
def check_rdzv_id_same(fleet: Fleet) -> Answer:
    """Report nodes whose torchrun would join a different rendezvous, or wait for a different number of nodes."""
    if not fleet.gathered:
        return skipped("no launcher was seen, so there is only one process")
    processes = list(fleet.processes())
    met = any("TORCHELASTIC_RUN_ID" in process.variables for _, process in processes)
    names = [name for name in RENDEZVOUS[:1] if met] or [
        name for name in RENDEZVOUS if any(text_of(process, name) for _, process in processes)
    ]
    if not names:
        return skipped("torchrun's options are not set by variables (PET_RDZV_ID, PET_NNODES, PET_RDZV_ENDPOINT)")
    splits = {name: compare(_voice(node, process, name) for node, process in processes) for name in names}
    what = "these nodes never connect, and each waits without an error"
    problems = []
    for name, split in splits.items():
        if split is not None:
            summary = f"{_who_has_what(name, split, by_rank=False)}: {what}"
            problems.append(disagreement(split, summary, _export_fix(name, split, "nodes"), ranks=split.ranks))
    first = processes[0][1]
    return judged(problems, ", ".join(f"{name}={text_of(first, name) or 'unset'}" for name in names))
