"""DD231 to DD239: the variables and ranks of a launch, Slurm's included, and what rules ask about a job's processes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ddpdoctor.model import launch as env
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import count_of, first_names, grouped, name_list, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, found, judged, passed, skipped
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.model.node import Fleet, Limits, Names, Network, Node, NodeProcess


# Many faults that are fatal between nodes do no harm on one.
ONE_NODE = "the job has one node, according to the launcher and the variables"
FIRST_HOST_OF_SLURM = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def ranks_of(processes: Iterable[NodeProcess]) -> tuple[int, ...]:
    """Return the sorted ranks of processes, without those that have no rank."""
    return tuple(sorted({process.rank for process in processes if process.rank is not None}))


def show_variables(process: NodeProcess, names: Iterable[str]) -> str:
    """Return "RANK=0, WORLD_SIZE=8" for the variables that are set."""
    return ", ".join(f"{name}={process.variables[name]}" for name in names if name in process.variables)


def count_nodes(fleet: Fleet) -> env.NodeCount | None:
    """Return the largest count from the nodes that answered, the launcher and the variables, or None."""
    counts = []
    for _, process in fleet.processes():
        count, slurm_nodes = env.read_node_count(process), process.number("SLURM_NNODES")
        if count is None and slurm_nodes is not None and process.number("SLURM_NODEID") is not None:
            # A batch script runs here, and `srun` will start ranks on all nodes of its job. The shell of `salloc` on a
            # login node has no SLURM_NODEID, because that host is not part of the job.
            count = env.NodeCount(nodes=slurm_nodes, source=f"SLURM_NNODES is {slurm_nodes}")
        if count is not None:
            counts.append(count)
    if fleet.gathered:
        counts.append(env.NodeCount(nodes=len(fleet.nodes), source=f"{len(fleet.nodes)} nodes answered"))
    if fleet.nnodes is not None:
        counts.append(env.NodeCount(nodes=fleet.nnodes, source=f"the launcher was started for {fleet.nnodes} nodes"))
    return max(counts, key=lambda count: count.nodes, default=None)


def has_several_nodes(fleet: Fleet) -> bool:
    """Return whether the job has more than one node."""
    count = count_nodes(fleet)
    return len(fleet.nodes) > 1 or (count is not None and count.nodes > 1)


def ranks_here(node: Node) -> int:
    """Return LOCAL_WORLD_SIZE, else the number of ranks that reported from this node, else 1."""
    said = node.first.number("LOCAL_WORLD_SIZE")
    return said if said is not None and said > 0 else max(1, len(node.ranks))


def ranks_words(node: Node) -> str:
    """Return "1 rank" or "8 ranks"."""
    return count_of(ranks_here(node), "rank")


def world_size(node: Node) -> int | None:
    """Return WORLD_SIZE, or None if it is not a number above 0."""
    said = node.first.number("WORLD_SIZE")
    return said if said is not None and said > 0 else None


def cpus_here(node: Node, limits: Limits) -> frozenset[int]:
    """Return the CPUs that any process of the job may run on."""
    return frozenset(cpu for process in node.processes for cpu in process.cpus) or frozenset(limits.cpus_allowed)


def effective_cpus(node: Node, limits: Limits) -> float:
    """Return how many CPUs the processes of a node can use, by affinity and quota."""
    allowed = len(cpus_here(node, limits)) or limits.cpus_online
    return allowed if limits.cpu_quota is None else min(float(allowed), limits.cpu_quota)


def cpus_words(node: Node, limits: Limits) -> str:
    """Return "8 CPUs", or "a quota of 2.5 of 64 CPUs"."""
    allowed = len(cpus_here(node, limits)) or limits.cpus_online
    if limits.cpu_quota is not None and limits.cpu_quota < allowed:
        return f"a quota of {number(limits.cpu_quota)} of {allowed} CPUs"
    return count_of(allowed, "CPU")


def number(value: float) -> str:
    """Return "2" or "2.5"."""
    return f"{value:.1f}".removesuffix(".0")


_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")
# A number, the number it must be below, and what such numbers are called.
_BELOW = (
    ("RANK", "WORLD_SIZE", "ranks"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "local ranks"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE", "node ranks"),
    ("PET_NODE_RANK", "PET_NNODES", "node ranks"),
)
_PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
MAX_PORT = 65_535
NO_LAUNCHER = "no launcher's variables are set"
# Values that make one process a job of one rank.
_MADE_UP = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@rule(
    "DD231", "env-complete", Severity.ERROR, "A launch variable is missing or not a number",
    after=("fqdn-forward",),
    group=CheckGroup.LAUNCH, needs=(), reads="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
)  # fmt: skip
def check_env_complete(node: Node) -> Answer:
    """Report a rank that has only some of the variables that `init_process_group` reads."""
    found = [process for process in node.processes if any(name in process.variables for name in env.RANK_VARIABLES)]
    if not found:
        return skipped(NO_LAUNCHER)
    problems = []
    texts = grouped(((name, env.text_of(process, name)), process) for name in _NUMBERS for process in found)
    for (name, text), those in texts.items():
        try:
            int(text or "0")  # as torch does
        except ValueError:
            summary = f"{name} is {text!r}, which is not an integer: init_process_group raises ValueError"
            problems.append(Problem(summary=summary, fix=f"export {name} as an integer", ranks=ranks_of(those)))
    return judged([*problems, *_missing_variables(found)], show_variables(found[0], env.RANK_VARIABLES))


def _missing_variables(processes: list[NodeProcess]) -> Iterator[Problem]:
    by_names: dict[tuple[str, ...], list[NodeProcess]] = {}
    for process in processes:
        missing = tuple(name for name in env.RANK_VARIABLES if not env.text_of(process, name))
        # A script may export the others before it starts the ranks.
        prepares = "RANK" in missing and ("WORLD_SIZE" in missing or _numbered_by_others(process))
        if missing and (not prepares or any(name in process.variables for name in missing)):
            by_names.setdefault(missing, []).append(process)
    for missing, those in by_names.items():
        first = those[0]
        empty = [name for name in missing if name in first.variables]
        is_rank = "RANK" not in missing and not _numbered_by_others(first)
        values = dict(_MADE_UP)
        if "SLURM_PROCID" in first.variables:
            values["RANK"] = "$SLURM_PROCID"
        if "SLURM_NTASKS" in first.variables:
            values["WORLD_SIZE"] = "$SLURM_NTASKS"
        if "SLURM_JOB_NODELIST" in first.variables:
            values["MASTER_ADDR"] = FIRST_HOST_OF_SLURM
        yield Problem(
            summary=f"{name_list(missing)} {'is' if len(missing) == 1 else 'are'} not set: init_process_group fails "
            f'with "environment variable {missing[0]} expected, but not set"',
            evidence=(
                f"set variables: {show_variables(first, env.RANK_VARIABLES)}",
                *(f"{name} is empty, which counts as unset" for name in empty),
            ),
            fix="start the ranks with torchrun, or in each process: "
            + " ".join(["export", *(f"{name}={values[name]}" for name in missing)]),
            severity=None if is_rank else Severity.WARNING,
            ranks=ranks_of(those),
        )


def _numbered_by_others(process: NodeProcess) -> bool:
    return any(name in process.variables for name in (*env.OTHER_RANK_VARIABLES, "SLURM_JOB_ID"))


@rule(
    "DD232", "env-range", Severity.ERROR, "A launch variable is out of range",
    after=("env-complete",),
    group=CheckGroup.LAUNCH, needs=(), reads="RANK, LOCAL_RANK, GROUP_RANK, PET_NODE_RANK and their sizes, MASTER_PORT",
)  # fmt: skip
def check_env_range(node: Node) -> Answer:
    """Report ranks that are out of range for their world size, and ports that do not exist."""
    found = [process for process in node.processes if _range_names(process)]
    if not found:
        return skipped(NO_LAUNCHER)
    problems = [problem for process in found for problem in _out_of_range(process)]
    return judged(problems, show_variables(found[0], _range_names(found[0])))


def _range_names(process: NodeProcess) -> tuple[str, ...]:
    names = [name for low, high, _ in _BELOW for name in (low, high)]
    return tuple(name for name in (*names, *_PORTS) if env.text_of(process, name))


def _out_of_range(process: NodeProcess) -> Iterator[Problem]:
    ranks = ranks_of([process])
    static = env.text_of(process, "PET_RDZV_BACKEND") in {"", "static"}
    for name, size_name, noun in _BELOW:
        if name == "PET_NODE_RANK" and not static:
            continue  # only the static rendezvous reads it, but operators always set it
        number, size = process.number(name), process.number(size_name)
        evidence, fix = (f"{name} is {number}",), f"number the {noun} from 0"
        if size is not None and size < 1:
            summary = f"{size_name} is {size}: it must be at least 1"
            yield Problem(summary=summary, fix=f"export {size_name}=1", ranks=ranks)
        elif number is not None and number < 0:
            yield Problem(summary=f"{name} is negative", evidence=evidence, fix=fix, ranks=ranks)
        elif number is not None and size is not None and number >= size:
            summary = f"{name} is not below {size_name}, which is {size}: {noun} range from 0 to {size - 1}"
            yield Problem(summary=summary, evidence=evidence, fix=f"{fix}, or raise {size_name}", ranks=ranks)
    local, world = process.number("LOCAL_WORLD_SIZE"), process.number("WORLD_SIZE")
    if local is not None and world is not None and local > world >= 1:
        summary = f"LOCAL_WORLD_SIZE is {local}, but WORLD_SIZE is {world}: a node cannot have more ranks than the job"
        yield Problem(summary=summary, fix="export WORLD_SIZE as the total number of ranks on all nodes", ranks=ranks)
    for name in _PORTS:
        port = process.number(name)
        if port is None or 1 <= port <= MAX_PORT or (port == 0 and world == 1):
            continue
        wrong = f"{port}: ports range from 1 to {MAX_PORT}"
        if port == 0:
            wrong = "0, which means any free port: the other ranks cannot know the port of rank 0"
        yield Problem(summary=f"{name} is {wrong}", fix=f"export {name}=29500", ranks=ranks)


# Values of SLURM_DISTRIBUTION that give a node's tasks consecutive numbers (sbatch(1), --distribution).
_BY_BLOCKS = ("", "block", "block:block", "block:cyclic", "block:fcyclic")
SHOWN = 4  # how many ranks are named


@rule(
    "DD233", "rank-set", Severity.ERROR, "A rank is missing or duplicated",
    after=("ws-same",),
    group=CheckGroup.LAUNCH, needs=(), reads="the ranks that answered, WORLD_SIZE, PET_NODE_RANK, SLURM_STEP_NODELIST",
)  # fmt: skip
def check_rank_set(fleet: Fleet) -> Answer:
    """Report ranks that did not answer, that two processes claim, or that are too high for the world size."""
    if not fleet.gathered:
        return skipped("no launcher was seen, so there is only one process")
    if fleet.world_size is None:
        return skipped("the launcher does not report the number of ranks")
    problems = [*_missing_ranks(fleet, fleet.world_size), *_misnumbered(fleet, fleet.world_size)]
    if fleet.launcher is Launcher.NNODES:
        return judged(problems, f"{len(fleet.nodes)} of {fleet.world_size} nodes answered")
    ranks = [process.rank for _, process in fleet.processes() if process.rank is not None]
    seen = f"{rank_list(ranks)} of {fleet.world_size} answered" if ranks else "no rank answered"
    return judged(problems, seen)


def _missing_ranks(fleet: Fleet, size: int) -> Iterator[Problem]:
    missing = sorted(fleet.missing)
    by_nodes = fleet.launcher is Launcher.NNODES
    if not missing and not by_nodes and sum(1 for _ in fleet.processes()) < size:
        claimed = {process.rank for _, process in fleet.processes()}
        missing = [rank for rank in range(size) if rank not in claimed]
    if not missing:
        return
    hosts: tuple[str, ...] = ()
    if not by_nodes:
        by_rank = _slurm_hosts(fleet)
        expected = dict.fromkeys(
            # launchers number node by node
            by_rank.get(rank)
            or next((node.host for node in fleet.nodes if node.ranks and node.ranks[0] < rank < node.ranks[-1]), None)
            for rank in missing
        )
        hosts = tuple(host for host in expected if host is not None) if None not in expected else ()
    on = f" on {name_list(hosts)}" if hosts else ""
    who = rank_list(missing, "node" if by_nodes else "rank")
    fix = "check on each host that its launcher is running and can reach rank 0's host"
    if hosts:
        fix = f"check that the launcher is running on {name_list(hosts)} and can reach rank 0's host: ssh {hosts[0]}"
    answered = tuple(node.host for node in fleet.nodes)
    silent = [host for host in hosts if host not in answered]
    whereabouts = [f"no message from {name_list(silent)}"] if silent else []
    whereabouts += [f"these answered: {name_list(answered)}"] if answered else []
    summary = f"{who} of {size}{on} did not respond: all others would wait for {verb(missing, 'it', 'them')}"
    yield Problem(summary=summary, evidence=(*whereabouts, *fleet.problems), fix=fix, ranks=tuple(missing), hosts=hosts)


def _slurm_hosts(fleet: Fleet) -> dict[int, str]:
    """Return the host of every task of the step, with the names that the nodes use for themselves."""
    first = next((process for _, process in fleet.processes()), None)
    if first is None or env.text_of(first, "SLURM_DISTRIBUTION") not in _BY_BLOCKS or "RANK" in first.variables:
        return {}
    try:
        hosts = env.expand_hosts(env.text_of(first, "SLURM_STEP_NODELIST"))
    except ValueError:
        return {}
    counts = _tasks_by_node(first)
    if len(hosts) != len(counts):
        return {}
    known_as = {node.host.partition(".")[0]: node.host for node in fleet.nodes}
    each = [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]
    return {rank: known_as.get(host, host) for rank, host in enumerate(each)}


NODE_RANK = "PET_NODE_RANK"  # torchrun reads --node-rank from this variable. It stands for that option here too.


def _misnumbered(fleet: Fleet, size: int) -> Iterator[Problem]:
    """Yield numbers of ranks, or of nodes, that several claim, and numbers that are not below ``size``."""
    by_nodes = fleet.launcher is Launcher.NNODES  # it counts nodes, and RANK may be set all the same
    if by_nodes:
        noun, who, hangs, limit = "node", "host", "hangs or fails", "--nnodes on all nodes"
        fix = f"give each host its own number, --node-rank 0 to {size - 1}; in a Slurm step, $SLURM_NODEID"
        numbers = [(node.first.number(NODE_RANK), node.host, node.host) for node in fleet.nodes if node.processes]
        numbers.sort(key=lambda said: said[0] or 0)
    else:
        noun, who, hangs, limit = "rank", "process", "hangs", "WORLD_SIZE on all ranks"
        fix = "give each process its own rank: use torchrun, or set RANK=$SLURM_PROCID in each srun task"
        numbers = [
            (process.rank, node.host, f"process {process.pid} on {node.host}") for node, process in fleet.processes()
        ]
    claims = grouped((number, (host, claimant)) for number, host, claimant in numbers if number is not None)
    doubled = {number: those for number, those in sorted(claims.items()) if len(those) > 1}
    if doubled:
        names, most = (name_list, None) if by_nodes else (first_names, SHOWN)
        evidence = [
            f"{noun} {number}: {names([claimant for _, claimant in those])}"
            for number, those in list(doubled.items())[:most]
        ]
        missing = () if by_nodes else fleet.missing
        nobody = [number for number in range(size) if number not in claims and number not in missing]
        yield Problem(
            summary=f"{rank_list(doubled, noun)} {verb(doubled, 'is', 'are')} used by more than one {who}, so the job "
            f"{hangs}",
            evidence=(*evidence, *([f"no {who} has {rank_list(nobody, noun)}"] if nobody else [])),
            fix=fix,
            ranks=tuple(doubled),
            hosts=tuple(dict.fromkeys(host for those in doubled.values() for host, _ in those)),
        )
    outside = sorted(number for number in claims if not 0 <= number < size)
    if outside:
        are_outside = f"{rank_list(outside, noun)} {verb(outside, 'is', 'are')} out of range"
        summary = f"{are_outside}: {noun}s range from 0 to {size - 1}"
        fix = f"number the {noun}s from 0, or raise {limit}"
        hosts = tuple(dict.fromkeys(host for number, host, _ in numbers if number in outside))
        yield Problem(summary=summary, fix=fix, ranks=tuple(outside), hosts=hosts)


# Interfaces that network plugins create on the machine itself, not inside its pods.
HOST_INTERFACES = ("cni", "cali", "cilium", "flannel", "kube-ipvs", "lxc", "nodelocaldns")
# Our choice: a single such name may be an interface of the pod. A machine has the plugin's own and one for each pod.
MANY_HOST_INTERFACES = 2
_SHOWN = (
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "GROUP_WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "MASTER_ADDR",
)  # fmt: skip


@rule(
    "DD239", "k8s", Severity.WARNING, "The Kubernetes pod does not match its job",
    group=CheckGroup.LAUNCH, needs=("names", "network"),
    reads="KUBERNETES_SERVICE_HOST, PET_*, MASTER_ADDR, getaddrinfo, interfaces, /proc/net/tcp",
)  # fmt: skip
def check_k8s(node: Node) -> Answer:
    """Report pods whose options are overridden, whose names do not resolve, or whose network breaks the job."""
    if not any(env.text_of(process, "KUBERNETES_SERVICE_HOST") for process in node.processes):
        return skipped("this is not a Kubernetes pod")
    process, ranks, problems = node.first, ranks_of(node.processes), []
    if env.by_torchrun(process):  # which the operator's variables were meant for
        groups, asked = process.number("GROUP_WORLD_SIZE"), env.nodes_range(env.text_of(process, "PET_NNODES"))
        if groups is not None and asked is not None and not asked[0] <= groups <= asked[1]:
            alone = groups == 1 and asked[1] > 1
            effect = "each pod trains alone" if alone else "its command line overrules the operator"
            set_to = env.text_of(process, "PET_NNODES")
            summary = f"the operator set PET_NNODES={set_to}, but torchrun counts {groups}: {effect}"
            evidence = (f"GROUP_WORLD_SIZE is {groups}",)
            fix = "remove --nnodes and --standalone from torchrun's command, so that it uses PET_NNODES"
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix, ranks=ranks))
        local, wanted = process.number("LOCAL_WORLD_SIZE"), process.number("PET_NPROC_PER_NODE")
        if local is not None and wanted is not None and local != wanted:
            summary = f"the operator set PET_NPROC_PER_NODE={wanted}, but torchrun started {local} on this pod"
            evidence = (f"LOCAL_WORLD_SIZE is {local}",)
            job = f"set the job's numProcPerNode (nprocPerNode) to {local}"
            fix = f"remove --nproc-per-node from torchrun's command, or {job}"
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix, ranks=ranks))
    problems += _network_faults(process, known(node.names), known(node.network))
    return judged(problems, show_variables(process, _SHOWN) or "a pod without an operator's variables")


def _network_faults(process: NodeProcess, names: Names | None, network: Network | None) -> Iterator[Problem]:
    master = names.master if names is not None else None
    if master is not None and master.error is not None and not env.is_loopback(master.name):
        service = master.name.partition(".")[2].partition(".")[0] or master.name
        patch = '{"spec":{"publishNotReadyAddresses":true}}'
        given = [name for name in ("MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR") if env.text_of(process, name)]
        summary = f"the master's name {master.name} does not resolve in this pod: no service publishes it"
        evidence = (master.error, *(f"{name}={env.text_of(process, name)}" for name in given[:1]))
        yield Problem(summary=summary, evidence=evidence, fix=f"kubectl patch service {service} -p '{patch}'")
    if network is None:
        return
    if network.mesh_proxy:
        summary = "Istio's proxy intercepts all connections of this pod: ranks connect but then hang"
        fix = 'give the pods the annotation sidecar.istio.io/inject: "false"'
        yield Problem(summary=summary, evidence=("Istio's proxy listens on ports 15001 and 15006",), fix=fix)
    own = names.own.addresses if names is not None else ()
    hosts = [interface.name for interface in network.interfaces if interface.name.startswith(HOST_INTERFACES)]
    if own and len(hosts) >= MANY_HOST_INTERFACES and all(map(env.is_loopback, own)):
        default = network.default_interface or "INTERFACE"
        yield Problem(
            summary="the pod uses the host's network and /etc/hosts, where the host name is loopback: Gloo sends the "
            "other ranks a loopback address",
            evidence=(f"interfaces: {', '.join(hosts[:4])}", f"its name has the address {own[0]}"),
            fix=f"fix /etc/hosts on the host, or export GLOO_SOCKET_IFNAME={default} in the pod",
        )


NOT_SLURM = "this does not run under Slurm"
NO_STEP = "this is the shell of a Slurm job: srun has not started a step yet"
# Entries that end the list of CUDA_VISIBLE_DEVICES. Slurm writes the last one for a step without GPUs.
NO_DEVICE = ("", "-1", "NoDevFiles")
_SHOWN_OF_SLURM = (
    "SLURM_NNODES", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_GPUS_ON_NODE", "RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE",
)  # fmt: skip


def _tasks_by_node(process: NodeProcess) -> tuple[int, ...]:
    try:
        return env.expand_counts(
            env.text_of(process, "SLURM_STEP_TASKS_PER_NODE") or env.text_of(process, "SLURM_TASKS_PER_NODE")
        )
    except ValueError:
        return ()


@rule(
    "DD236", "slurm-shape", Severity.ERROR, "The Slurm step does not match the torch job",
    group=CheckGroup.LAUNCH, needs=(),
    reads="SLURM_NTASKS, SLURM_NNODES, SLURM_PROCID, SLURM_STEP_TASKS_PER_NODE, SLURM_GPUS_ON_NODE, WORLD_SIZE, RANK",
)  # fmt: skip
def check_slurm_shape(node: Node) -> Answer:
    """Report a step that starts neither one task for each rank nor one torchrun on each node."""
    found = []
    for process in node.processes:
        tasks = process.number("SLURM_NTASKS") or process.number("SLURM_NPROCS")
        nodes = process.number("SLURM_NNODES")
        if tasks is not None and nodes is not None:
            found.append((process, tasks, nodes))
    if not found:
        return skipped(NOT_SLURM)
    problems = [problem for shape in found for problem in _misshapen(*shape)]
    if not problems and not any(env.in_slurm_step(process) or env.by_torchrun(process) for process, _, _ in found):
        return skipped(NO_STEP)
    return judged(problems, show_variables(found[0][0], _SHOWN_OF_SLURM))


def _misshapen(process: NodeProcess, tasks: int, nodes: int) -> Iterator[Problem]:
    """Judge the tasks and nodes of the step, or of the whole job if no step was started."""
    in_step, ranks, counts = env.in_slurm_step(process), ranks_of([process]), _tasks_by_node(process)
    job_nodes = process.number("SLURM_JOB_NUM_NODES")  # inside a step, SLURM_NNODES is not the job's
    if job_nodes is None:
        with contextlib.suppress(ValueError):
            job_nodes = len(env.expand_hosts(env.text_of(process, "SLURM_JOB_NODELIST")))
    if env.by_torchrun(process):
        local = process.number("LOCAL_WORLD_SIZE")
        most = max(counts, default=-(-tasks // max(nodes, 1))) if in_step else None
        yield from _torchrun(process, nodes, job_nodes or nodes, most)
    else:
        here = process.number("SLURM_NODEID")
        local = counts[here] if in_step and here is not None and 0 <= here < len(counts) else None
    world, rank, task = process.number("WORLD_SIZE"), process.number("RANK"), process.number("SLURM_PROCID")
    if in_step and tasks > 1 and not env.by_torchrun(process):  # each task is a rank
        if world is not None and world != tasks and (tasks != nodes or rank is not None):
            more = f"they wait for {world - tasks} ranks that never start"
            consequence = more if world > tasks else "there are more tasks than ranks"
            summary = f"WORLD_SIZE is {world}, but srun started {tasks} tasks: {consequence}"
            by_node = "start torchrun once on each node: srun --ntasks-per-node=1 torchrun …"
            fix = f"export WORLD_SIZE=$SLURM_NTASKS in each task, or {by_node}"
            severity = None if rank is not None else Severity.WARNING
            evidence = (show_variables(process, _SHOWN_OF_SLURM),)
            yield Problem(summary=summary, evidence=evidence, fix=fix, severity=severity, ranks=ranks)
        if rank is not None and task is not None and rank != task:
            summary = "RANK is not SLURM_PROCID: tasks may share a rank or run on unexpected nodes"
            evidence = (f"RANK is {rank} and SLURM_PROCID is {task}",)
            fix = "export RANK=$SLURM_PROCID in each task, not in the batch script"
            yield Problem(summary=summary, evidence=evidence, fix=fix, severity=Severity.WARNING, ranks=ranks)
    gpus = process.number("SLURM_GPUS_ON_NODE")
    if local is not None and gpus is not None and local > gpus >= 1:
        summary = f"{local} ranks run on this node, but Slurm gave it {count_of(gpus, 'GPU')}"
        evidence = (f"SLURM_GPUS_ON_NODE is {gpus}",)
        fix = f"--gpus-per-node={local}, or at most {gpus} ranks per node"
        yield Problem(summary=summary, evidence=evidence, fix=fix, severity=Severity.WARNING, ranks=ranks)
    if in_step and tasks > 1 and job_nodes is not None and nodes < job_nodes:
        summary = f"the step runs on {nodes} of the {job_nodes} nodes of the job"
        fix = f"srun --nodes={job_nodes} …, if all nodes should train"
        yield Problem(summary=summary, fix=fix, severity=Severity.INFO, ranks=ranks)


def _torchrun(process: NodeProcess, nodes: int, job_nodes: int, most_on_a_node: int | None) -> Iterator[Problem]:
    """Judge a rank of torchrun. ``most_on_a_node``: the step's tasks on a node, or None if no step was started."""
    groups = process.number("GROUP_WORLD_SIZE")
    evidence: tuple[str, ...] = ()
    if groups is None:
        return
    if most_on_a_node is not None and most_on_a_node > 1:
        times = f"{most_on_a_node} times per node"
        what = f"srun starts torchrun {times}, and each torchrun starts ranks for the whole node"
    elif most_on_a_node is not None and groups < nodes:
        counted = count_of(groups, "node")
        what = f"torchrun counts {counted}, but the step has {nodes}: they do not all train together"
        evidence = (f"GROUP_WORLD_SIZE is {groups}, SLURM_NNODES is {nodes}",)
    elif groups == 1 and job_nodes > 1:
        why = "it was started without srun" if most_on_a_node is None else "the step has one task"
        what = f"the job has {job_nodes} nodes, but torchrun uses one: {why}"
    else:
        return
    fix = "srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES …"
    yield Problem(summary=what, evidence=evidence, fix=fix, severity=Severity.WARNING, ranks=ranks_of([process]))


@rule(
    "DD237", "srun-cpus", Severity.WARNING, "srun gave a task fewer CPUs than requested",
    group=CheckGroup.LAUNCH, needs=(), reads="SLURM_CPUS_PER_TASK, SRUN_CPUS_PER_TASK, sched_getaffinity",
)  # fmt: skip
def check_srun_cpus(node: Node) -> Answer:
    """Report tasks that may use fewer CPUs than the batch script's `--cpus-per-task`."""
    tasks = [process for process in node.processes if env.in_slurm_step(process)]
    if not tasks:
        return skipped(NO_STEP if any("SLURM_JOB_ID" in process.variables for process in node.processes) else NOT_SLURM)
    asked = tasks[0].number("SLURM_CPUS_PER_TASK")
    if asked is None:
        return skipped("the job did not request a number of CPUs per task")
    if env.by_torchrun(tasks[0]):
        fewest, short = len({cpu for process in tasks for cpu in process.cpus}), tasks
    else:
        fewest = min(len(process.cpus) for process in tasks)
        short = [process for process in tasks if len(process.cpus) == fewest]
    seen = f"{asked} CPUs requested per task, {fewest} usable"
    if fewest >= asked:
        return passed(seen)
    summary = (
        f"the job requested {asked} CPUs per task, but srun lets a task use only {fewest}, shared with its "
        "loader workers"
    )
    fix = f"export SRUN_CPUS_PER_TASK={asked} in the batch script, or srun --cpus-per-task={asked}"
    evidence = (f"SRUN_CPUS_PER_TASK is {env.text_of(short[0], 'SRUN_CPUS_PER_TASK') or 'not set'}",)
    return found(summary, seen, evidence=evidence, fix=fix, ranks=ranks_of(short))


@rule(
    "DD238", "gpus-per-task", Severity.WARNING, "Each task sees only one GPU, so cuda:LOCAL_RANK does not exist",
    group=CheckGroup.LAUNCH, needs=("torch",),
    reads="CUDA_VISIBLE_DEVICES, LOCAL_RANK, SLURM_LOCALID, torch.cuda.device_count",
)  # fmt: skip
def check_gpus_per_task(node: Node) -> Answer:
    """Report tasks of a Slurm step that see fewer GPUs than their local rank needs."""
    tasks = [process for process in node.processes if env.in_slurm_step(process) and not env.by_torchrun(process)]
    if not tasks:
        started = any(env.by_torchrun(process) for process in node.processes)
        return skipped("torchrun assigns the GPUs" if started else NOT_SLURM)
    torch = known(node.torch)
    unset = torch.device_count if torch is not None and torch.import_error is None else None
    seen, short = [], []
    for process in tasks:
        text, visible = process.variables.get("CUDA_VISIBLE_DEVICES"), unset
        if text is not None:
            entries = [entry.strip() for entry in text.split(",")]
            visible = next((place for place, entry in enumerate(entries) if entry in NO_DEVICE), len(entries))
        if visible is None:
            continue
        seen.append(visible)
        local = process.number("LOCAL_RANK")
        local = local if local is not None else process.number("SLURM_LOCALID")
        if 0 < visible <= (local or 0):
            short.append((process, visible))
    if not any(seen):
        return skipped("the tasks see no GPU")
    words = f"{len(seen)} tasks on this node, {seen[0]} GPU visible to the first"
    if not short:
        return passed(words)
    process, visible = short[-1]
    count, sees = process.number("SLURM_GPUS_ON_NODE"), f"each task sees only {count_of(visible, 'GPU')}"
    summary = f"{sees}, so cuda:LOCAL_RANK does not exist in the later tasks of a node"
    named = ("SLURM_LOCALID", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK")
    gpus = f"--gpus-per-node={count}" if count is not None and count > 1 else "--gpus-per-node=N"
    fix = f"srun {gpus} instead of --gpus-per-task, or torch.cuda.set_device(0) in each task"
    evidence, ranks = (show_variables(process, named),), ranks_of(process for process, _ in short)
    return found(summary, words, evidence=evidence, fix=fix, confidence=Confidence.MEDIUM, ranks=ranks)
