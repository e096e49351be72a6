"""Reasons in the processors for a low bandwidth: too few, busy with other work, or at a low clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.reading import known
from ddpdoctor.model.words import count_of, grouped, rank_list
from ddpdoctor.rules.bandwidth.reasons import Effect, Weighed, weigh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Governor, Load
    from ddpdoctor.rules.bandwidth.reasons import BenchNode, BenchView

BUSY_CORES = 0.25
"""Our choice: a quarter of a processor; daemons briefly use less."""
STEAL_SHARE = 0.05
"""Our choice: a twentieth of the time in which a virtual machine wanted to run."""
SELF_CLOCKING = frozenset({"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"})
"""Drivers whose "powersave" is the normal governor and clocks up under load (Linux, admin-guide/pm/intel_pstate.rst and
amd-pstate.rst). With all others it is the lowest clock."""
FOLDER = "/sys/devices/system/cpu"
SAVING = "power"
"""The energy_performance_preference that prefers saving power over speed."""


def processor_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield reasons in the processors of each machine."""
    for place in view.places:
        load = known(place.node.load)
        yield from _crowded(place)
        if load is not None:
            yield from _busy(place, load)
            yield from _stolen(place, load)
            yield from _held_down(place, load)


def _crowded(place: BenchNode) -> Iterator[Weighed]:
    """Yield a reason if a machine's ranks have fewer CPUs than there are ranks, by affinity or by quota."""
    cpus = {cpu for process in place.node.processes for cpu in process.cpus}
    limits = known(place.node.limits)
    quota = limits.cpu_quota if limits is not None else None
    ranks, given = len(place.members), min(len(cpus), quota or len(cpus))
    if not cpus or given >= ranks:
        return
    online = limits.cpus_online if limits is not None else len(cpus)
    of_all = f" of the machine's {online}" if online > len(cpus) else ""
    if given < len(cpus):
        text = f"{_ranks(ranks)} a quota of {given:.3g} CPUs: the kernel throttles all of them when it is used up"
        source = "cpu.max of the cgroup"
    else:
        own = count_of(len(cpus), "CPU")
        text = f"{_ranks(ranks)} {own}{of_all}: a collective waits for ranks that have no core"
        source = "sched_getaffinity"
    fix = (
        f"start at most {count_of(max(1, int(given)), 'rank')} here, or give them more CPUs: taskset, srun -c, docker "
        "run --cpus"
    )
    yield weigh(Effect.LIMIT, place, text, source, ranks=place.ranks, fix=fix)


def _busy(place: BenchNode, load: Load) -> Iterator[Weighed]:
    """Yield ranks whose CPUs are taken by other work. Ranks with the same CPUs are judged together."""
    groups = grouped((process.cpus, process) for process in place.node.processes)
    for cpus, processes in groups.items():
        taken = sum(one.share for one in load.busy if one.cpu in cpus)
        # If all ranks have the same CPUs, ranks that did not report have them too.
        count = len(place.members) if len(groups) == 1 else len(processes)
        if taken < BUSY_CORES or count + taken <= len(cpus):
            continue
        yield weigh(
            Effect.SHARED,
            place,
            f"other processes kept {taken:.1f} of {count_of(len(cpus), 'CPU')} busy ({rank_list(cpus, 'CPU')}), but "
            f"{count_of(count, 'rank')} {'needs' if count == 1 else 'need'} them too",
            "/proc/stat, while the ranks were idle",
            ranks=tuple(sorted(process.rank for process in processes if process.rank is not None)),
            fix="run `top -o %CPU` to find them; end leftover processes, or use an idle machine",
        )


def _stolen(place: BenchNode, load: Load) -> Iterator[Weighed]:
    if load.steal_share is None or load.steal_share < STEAL_SHARE:
        return
    text = f"the hypervisor took {load.steal_share:.0%} of this virtual machine's CPU time (steal)"
    fix = "request dedicated CPUs, or another machine"
    yield weigh(Effect.SHARED, place, text, "/proc/stat: steal, since the start", fix=fix)


def _held_down(place: BenchNode, load: Load) -> Iterator[Weighed]:
    for one in load.governors:
        if one.name == "powersave" and one.driver not in SELF_CLOCKING:
            effect, what = Effect.LIMIT, "stay at their lowest clock"
        elif one.name == "powersave" and one.preference == SAVING:
            effect, what = Effect.SMALL, "prefer to save power, and raise their clock slowly"
        else:
            continue
        text = f"{count_of(one.cpus, 'CPU')} {what}: {_words(one)}"
        yield weigh(effect, place, text, f"{FOLDER}/*/cpufreq", fix="sudo cpupower frequency-set -g performance")


def _words(governor: Governor) -> str:
    preference = f", preference {governor.preference}" if governor.preference else ""
    return f"governor {governor.name} of {governor.driver or 'an unknown driver'}{preference}"


def _ranks(count: int) -> str:
    return "1 rank has" if count == 1 else f"{count} ranks share"
