"""Reports of NCCL's RAS subsystem (``ncclras``, NCCL 2.24 and newer), as text in any log, or as JSON.

Since NCCL 2.31 also the lines "NCCL DIAG" of its diagnostics (``ncclras -D``, NCCL_RUN_DIAGNOSTICS,
NCCL_RUN_RAS_DIAGNOSTICS), which only inform: the job continues.

A report counts which operations each rank of a communicator has launched. In text it names the rarer side, which may be
the one that is ahead: the lower count is behind. Ranks are the communicator's, and nodes are addresses.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.logs.lines import DocumentFormat, Found, LineReader, quote
from ddpdoctor.logs.nccl_log import COLLECTIVES
from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.launch import parse_address
from ddpdoctor.model.words import grouped, odd_ranks, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.logs.lines import Document, Line


@dataclass(frozen=True, slots=True)
class RasProcess:
    """A process, as RAS names it. The number is the container's."""

    pid: int
    node: str  # its name or its address

    def who(self, **place: Any) -> lf.Who:
        if parse_address(self.node) is None:
            return lf.Who(host=self.node, pid=self.pid, **place)
        return lf.Who(address=self.node, pid=self.pid, **place)


@dataclass(slots=True, kw_only=True)
class Counted:
    """Ranks of a communicator that have something in common."""

    op: str
    number: int  # how many operations they have launched
    status: str = ""
    count: int  # the number of ranks
    spot: lf.Spot
    said: str
    # The ranks that RAS names. It only names the smaller side.
    ranks: dict[int, RasProcess | None] = field(default_factory=dict)

    @property
    def shown(self) -> dict[str, Any]:
        return {"spot": self.spot, "said": self.said}


@dataclass(slots=True, kw_only=True)
class RasCommunicator:
    """One communicator in a report."""

    key: str
    group: int | None
    size: int | None = None
    counted: list[Counted] = field(default_factory=list)
    statuses: list[Counted] = field(default_factory=list)
    errors: list[Counted] = field(default_factory=list)
    missing: dict[int, tuple[RasProcess | None, lf.Spot, str]] = field(default_factory=dict)
    processes: dict[int, RasProcess | None] = field(default_factory=dict)
    counts: dict[int, dict[str, int]] = field(default_factory=dict)  # from JSON: by rank and operation
    unready: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RasReport:
    """One report."""

    spot: lf.Spot
    time: lf.Time | None
    begun: bool = False  # whether the head of the report is over
    exact: bool = False  # whether the report is JSON, which has the counts of every rank
    gpus: int | None = None
    # By number: ranks of a communicator, communicators, errors, status.
    groups: dict[int, tuple[int, int, str, str]] = field(default_factory=dict)
    communicators: dict[str, RasCommunicator] = field(default_factory=dict)
    # Processes that do not answer, whether RAS considers them dead, and the lines.
    lost: list[tuple[RasProcess, bool, lf.Spot, str]] = field(default_factory=list)
    # What indented lines of its text belong to: "INCOMPLETE", "DEAD" or a communicator's error, the communicator, the
    # operation, and the state that the next ranks share.
    block: str = ""
    comm: RasCommunicator | None = None
    op: str = ""
    side: Counted | None = None

    def communicator(self, name: str, group: int | None) -> RasCommunicator:
        return self.communicators.setdefault(name, RasCommunicator(key=f"comm {name}", group=group))


@dataclass(slots=True)
class RasReports:
    """The reports of one file: the last one counts, and the one before it shows whether the job moved."""

    _former: RasReport | None = None
    _last: RasReport | None = None

    def add(self, report: RasReport) -> None:
        for comm in report.communicators.values():
            if comm.group in report.groups:
                comm.size = report.groups[comm.group][0]
            for op in dict.fromkeys(op for counts in comm.counts.values() for op in counts):
                numbers = {rank: counts.get(op, 0) for rank, counts in comm.counts.items()}
                if len(set(numbers.values())) == 1:
                    continue
                for number, count in Counter(numbers.values()).items():
                    ranks = {rank: comm.processes.get(rank) for rank, reached in numbers.items() if reached == number}
                    said = f"{rank_list(ranks)}: {op} {number}"
                    side = Counted(op=op, number=number, count=count, spot=report.spot, said=said, ranks=ranks)
                    comm.counted.append(side)
        self._former, self._last = self._last, report

    def judge(self) -> Iterator[lf.Fact]:
        last, former = self._last, self._former
        if last is None:
            return
        sizes = [comm.size for comm in last.communicators.values() if comm.size]
        largest = max([*sizes, *(ranks for ranks, _, _, _ in last.groups.values())], default=None)
        world = largest if largest is not None and largest == last.gpus and largest <= lf.MOST_RANKS else None
        global_ranks: dict[RasProcess, int] = {}
        for comm in last.communicators.values():
            if comm.size == world:
                absent = ((rank, process) for rank, (process, _, _) in comm.missing.items())
                named = (*comm.processes.items(), *absent)
                global_ranks = {process: rank for rank, process in named if process is not None}
        if world is not None:
            yield lf.Size(spot=last.spot, time=last.time, ranks=world)
        moves = former is not None and _moved(former, last)
        if moves:
            yield lf.Moving(spot=last.spot, time=last.time, said="the counts of operations grew between two reports")
        comms = last.communicators.values()
        for ranks, count, errors, status in last.groups.values():
            words = f"RAS: {count} communicator{'s' * (count > 1)} of {ranks} ranks: {status}, {errors}"
            yield lf.Hint(spot=last.spot, words=words, kind="ras")
        if last.exact and comms:
            equal = not any(comm.counted or comm.missing for comm in comms)
            words = "all ranks launched the same operations" if equal else "ranks launched different operations"
            yield lf.Hint(spot=last.spot, words=f"RAS: {len(comms)} communicators; {words}", kind="ras")
        # Processes that do not answer, unless a communicator names their rank
        missing = [process for comm in comms for process, _, _ in comm.missing.values()]
        is_only_one = len(last.lost) == 1 == len({rank for comm in comms for rank in comm.missing})
        for process, dead, spot, said in last.lost:
            if process not in missing and not is_only_one:  # "The missing rank: 21" is the only one
                who = process.who(rank=global_ranks.get(process))
                words = f"{said} (considered dead)" if dead else said
                yield lf.Absent(who=who, spot=spot, said=words, shown=lf.Shown.COUNTS, dead=dead)
        for name, comm in last.communicators.items():
            before = former.communicators.get(name) if former is not None else None
            yield from _Comm(last, comm, before, comm.size == world, global_ranks).judge(moves=moves)


@dataclass(frozen=True, slots=True)
class _Comm:
    _report: RasReport
    _comm: RasCommunicator
    _former: RasCommunicator | None  # the same in the report before
    _is_world: bool
    _ranks: dict[RasProcess, int]  # the ranks of processes in the job

    def judge(self, *, moves: bool) -> Iterator[lf.Fact]:
        comm = self._comm
        if comm.size and any(rank >= comm.size for state in comm.counted + comm.statuses for rank in state.ranks):
            words = f"a RAS report names ranks that its communicator of {comm.size} ranks cannot have: it is damaged"
            yield lf.Hint(spot=self._report.spot, words=words, kind="damaged")
            return
        yield from self._missing()
        for error in comm.errors:
            own = "CUDA" in error.status
            nature = lf.Nature.OWN if own else lf.Nature.PEER_LOST if "Remote" in error.status else lf.Nature.FOLLOWS
            for rank, process in error.ranks.items():
                who = self._who(rank, process)
                yield lf.Failed(who=who, type="NCCL error", message=error.status, nature=nature, **error.shown)
        yield from self._statuses()
        if not moves:
            yield from self._counts()

    def _who(self, rank: int, process: RasProcess | None = None) -> lf.Who:
        process = process or self._comm.processes.get(rank)
        known = rank if self._is_world else self._ranks.get(process) if process is not None else None
        place: dict[str, Any] = {"rank": known} if known is not None else {"group": self._comm.key, "group_rank": rank}
        return process.who(**place) if process is not None else lf.Who(**place)

    def _operation(self, op: str, number: int | None) -> lf.Operation:
        """Return an operation, which NCCL 2.24 and 2.25 do not name. Its group is not torch's: numbers are NCCL's."""
        words = "all ranks" if self._is_world else f"NCCL's communicator {self._comm.key.removeprefix('comm ')}"
        return lf.Operation(op=COLLECTIVES.get(op, ""), group=self._comm.key, group_words=words, seq=number)

    def _missing(self) -> Iterator[lf.Fact]:
        dead = {process for process, is_dead, _, _ in self._report.lost if is_dead}
        for rank, (process, spot, said) in self._comm.missing.items():
            words = f"{said} (considered dead)" if process in dead and "dead" not in said else said
            is_dead = "dead" in words or (len(self._comm.missing) == 1 == len(dead) == len(self._report.lost))
            yield lf.Absent(
                who=self._who(rank, process), spot=spot, said=words, operation=self._operation("", None),
                waiters=self._others([rank, *self._comm.missing]), shown=lf.Shown.COUNTS, dead=is_dead,
                certain="lacks this communicator" not in said,
            )  # fmt: skip

    def _statuses(self) -> Iterator[lf.Fact]:
        most = max((state.count for state in self._comm.statuses), default=0)
        for state in self._comm.statuses:
            if state.count == most:
                continue
            for rank, process in state.ranks.items():
                who = self._who(rank, process)
                if state.status == "FINALIZE":
                    yield lf.Finished(who=who, **state.shown)
                if state.status in {"FINALIZE", "NOCOMM", "INIT"}:
                    yield lf.Absent(
                        who=who, operation=self._operation("", None), in_init=state.status != "FINALIZE", certain=False,
                        expected=True, shown=lf.Shown.COUNTS, **state.shown,
                    )  # fmt: skip
                else:
                    yield lf.Hint(who=who, words=state.said, kind="ras-status", **state.shown)
        for rank in self._comm.unready:
            yield lf.Waiting(
                who=self._who(rank), spot=self._report.spot, operation=self._operation("", None), in_init=True,
                said=f"rank {rank} is still setting up its communicator",
            )  # fmt: skip

    def _counts(self) -> Iterator[lf.Fact]:
        comm = self._comm
        # The sides of each operation, furthest behind first, with all ranks whose names are known
        sides = grouped((count.op, count) for count in comm.counted)
        for those in sides.values():
            those.sort(key=lambda count: count.number)
            unnamed = [count for count in those if len(count.ranks) < count.count]
            if len(unnamed) == 1 and comm.size:
                known = {rank for count in those if count is not unnamed[0] for rank in count.ranks} | set(comm.missing)
                rest = [rank for rank in range(comm.size) if rank not in known]
                if len(rest) == unnamed[0].count:
                    unnamed[0].ranks = {rank: comm.processes.get(rank) for rank in rest}
        behind = {op: those for op, those in sides.items() if len(those) > 1}
        differ = self._differ(behind)
        if differ is not None:
            yield differ
            return
        named: set[int] = set()
        for op, those in sorted(behind.items(), key=lambda item: item[1][0].number - item[1][-1].number):
            yield from self._behind(op, those, named)
        if not behind:
            yield from self._inside()

    def _behind(self, op: str, those: list[Counted], named: set[int]) -> Iterator[lf.Fact]:
        low, high = those[0], those[-1]
        total = sum(count.count for count in those)
        both_said = low.said if low.said == high.said else f"{low.said}; {high.said}"
        if 2 * low.count > total:  # a few ranks are ahead and wait; RAS does not show which of the others is at fault
            operation = self._operation(op, high.number)
            for rank, process in high.ranks.items():
                yield lf.Waiting(who=self._who(rank, process), spot=high.spot, said=both_said, operation=operation)
            words = (
                f"{rank_list(high.ranks) if high.ranks else high.count} of a communicator launched {op} {high.number}, "
                f"and {low.count} others did not: those that RAS names are ahead, not at fault"
            )
            yield lf.Hint(words=words, kind="ras-ahead", **high.shown)
            return
        before = self._former.counted if self._former is not None else []
        stood = min((count.number for count in before if count.op == op), default=None) == low.number
        sure = high.number - low.number > 1 or stood
        waiters = self._others([*low.ranks, *self._comm.missing])
        for rank, process in low.ranks.items():
            if rank in named:
                continue
            named.add(rank)
            who, operation = self._who(rank, process), self._operation(op, low.number + 1)
            group, words = f"{operation.group} {op}", operation.group_words
            yield lf.Reached(who=who, group=group, group_words=words, enqueued=low.number, **low.shown)
            yield lf.Absent(
                who=who, spot=low.spot, said=both_said, operation=operation, waiters=waiters, certain=sure,
                shown=lf.Shown.COUNTS,
            )  # fmt: skip
        if not low.ranks:
            words = f"{low.count} of {total} ranks are behind, and RAS does not name them: `ncclras -v` does"
            yield lf.Hint(words=words, kind="ras-unnamed", **low.shown)

    def _differ(self, behind: dict[str, list[Counted]]) -> lf.Differ | None:
        """Return that ranks called different operations: behind in one, and ahead in another by as many."""
        ops = list(behind)
        for at, op in enumerate(ops):
            for other in ops[at + 1 :]:
                few, many = behind[op], behind[other]
                if len(few) != 2 or len(many) != 2 or not few[0].ranks or not many[0].ranks:
                    continue
                if set(few[0].ranks) == set(many[1].ranks) and set(few[1].ranks) == set(many[0].ranks):
                    sides = [
                        (self._global(many[0]), self._operation(op, few[1].number)),
                        (self._global(few[0]), self._operation(other, many[1].number)),
                    ]
                    sides.sort(key=lambda side: -len(side[0]))
                    if not all(ranks for ranks, _ in sides):
                        return None
                    return lf.Differ(
                        spot=few[0].spot, said=f"{few[0].said}; {many[0].said}", sides=tuple(sides),
                        odd=odd_ranks([ranks for ranks, _ in sides]), aspect="operation", settled=True,
                    )  # fmt: skip
        return None

    def _inside(self) -> Iterator[lf.Fact]:
        """Report that all ranks have launched the same, and nothing moved between two reports."""
        former, comm = self._former, self._comm
        if former is None or not comm.counts or comm.missing or len(comm.counts) != comm.size:
            return
        if former.counts == comm.counts and any(any(counts.values()) for counts in comm.counts.values()):
            ranks = tuple(sorted(rank for rank in (self._who(count).rank for count in comm.counts) if rank is not None))
            if len(ranks) == comm.size:
                said = "all ranks have launched the same operations, and no more of them in the second report"
                yield lf.Inside(spot=self._report.spot, said=said, operation=self._operation("", None), ranks=ranks)

    def _global(self, side: Counted) -> tuple[int, ...]:
        ranks = [self._who(rank, process).rank for rank, process in side.ranks.items()]
        return tuple(sorted(rank for rank in ranks if rank is not None)) if None not in ranks else ()

    def _others(self, ranks: list[int]) -> tuple[int, ...]:
        left = set(range(self._comm.size or 0)) - set(ranks)
        found = (self._who(rank).rank for rank in sorted(left))
        return tuple(rank for rank in found if rank is not None)


def _moved(former: RasReport, last: RasReport) -> bool:
    """Return whether the ranks that are furthest behind have launched more since the report before."""
    for name, comm in last.communicators.items():
        before = former.communicators.get(name)
        if before is None:
            continue
        for op in {count.op for count in before.counted} & {count.op for count in comm.counted}:
            least = [min(count.number for count in those.counted if count.op == op) for those in (before, comm)]
            if least[1] > least[0]:
                return True
        if any(sum(comm.counts[rank].values()) > sum(before.counts.get(rank, {}).values()) for rank in comm.counts):
            least_now = min(sum(counts.values()) for counts in comm.counts.values())
            least_then = min((sum(counts.values()) for counts in before.counts.values()), default=least_now)
            if least_now > least_then:
                return True
    behind = {name for name, comm in former.communicators.items() if comm.counted}
    return bool(behind) and not any(comm.counted for comm in last.communicators.values())


MOST_PROCESSES = 65_536  # our choice: no real job has a longer list of ranks
_WHERE = r" -- (?:GPU (?P<gpu>\d+)(?: \(NVML \d+\))? managed by process (?P<pid>\d+) on node (?P<node>\S+)|\[process)"
_GROUP = re.compile(
    r"^\s*(?P<group>\d+) +(?P<comms>\d+) +(?P<nodes>\d+) +(?P<per_node>\d+(?:-\d+)?) +(?P<ranks>\d+) +(?P<all>\d+) +"
    r"(?P<status>NOCOMM|INIT|RUNNING|FINALIZE|ABORT) +(?P<errors>[A-Z,]+)\s*$"
)
_JOB = re.compile(r"^\s*\d+ +\d+(?:-\d+)? +\d+(?:-\d+)? +\d+ +(?P<gpus>\d+)\s*$")
_COMM = re.compile(r"#(?P<group>\d+)-(?P<number>\d+) \((?P<hash>[0-9a-f]+)\) (?P<error>[A-Z]+)")
_COUNTS = re.compile(r"Communicator ranks have different (?P<op>\w+) operation counts")
_SAYS = (
    r"(?:ha(?:s|ve) (?:launched up to operation (?P<number>\d+)|(?P<none>not launched any operations)"
    r"|status (?P<status>[A-Z]+))|reported (?P<error>.+?))"
)
_SIDE = re.compile(r"(?P<count>\d+) ranks " + _SAYS + "$")
_ONE = re.compile(r"Rank (?P<rank>\d+)(?: " + _SAYS + ")?" + _WHERE)
_MISSING = re.compile(r"The missing ranks?: (?P<ranks>[\d, ]+)")
_PROCESS = re.compile(r"Process (?P<pid>\d+) on node (?P<node>\S+) managing GPUs? (?P<gpus>[\d,() NVML]+)")
_BLOCKS = ("INCOMPLETE", "DEAD", "TIMEOUT")
_DIAG = re.compile(
    r"(?:(?P<host>[A-Za-z0-9][\w.-]{0,252}):(?P<pid>\d{1,10}) )?NCCL DIAG \[(?P<tag>OK|INFO)\] +(?P<text>.+)"
)
_EDGE = re.compile(
    r"p2p: (?P<what>[a-zA-Z/ -]{1,80}) srcRank=(?P<src>\d+) srcCudaDev=(?P<gpu>\d+).{0,80}? "
    r"dstRank=(?P<dst>\d+) dstCudaDev=(?P<other>\d+)(?:.{0,80}? path=(?P<path>\w{1,20}))?"
)
_EDGES = re.compile(r"p2p: (?:only )?(?P<passed>\d+)/(?P<all>\d+) ")
_ON_RANKS = re.compile(r"rank\(s\) \{?(?P<ranks>\d[\d, ]*)")
_ACROSS = re.compile(r"across (?:\d+ of )?(?P<all>\d{1,9}) ranks")
_DIFFERS = re.compile(r"NCCL environment: mismatch .{0,120}? for (?P<name>NCCL_\w{1,80})")
_VALUE = re.compile(r"NCCL environment: NCCL_\w{1,80}=")
_MOST_DIAGNOSED = 256
# Where JSON lacks a comma before the next key or object, as that of NCCL 2.28.9 in each of its ``missing_ranks``.
_NO_COMMA = re.compile(r"(?<=[\d\"el\]}])(?P<blank>\s+)(?=\"[^\"\n]{1,80}\"\s*:)|(?<=})(?P<gap>\s*)(?={)")


@dataclass(slots=True, eq=False)
class RasReader(LineReader):
    """Finds RAS's text in logs and files."""

    name = "NCCL RAS report"
    triggers = (b"Job summary", b"Communicators...", b"managing GPU", b"managed by process", b"NCCL DIAG")
    begins = ("NCCL DIAG [", "PEER_DEAD: ", "Job summary", "Communicators...")
    _report: RasReport | None = None
    _reports: RasReports = field(default_factory=RasReports)
    _deaths: list[lf.Fact] = field(default_factory=list)
    # What NCCL's diagnostics say, and how many ranks the communicator has that it is about.
    _diagnosed: list[tuple[int, lf.Fact]] = field(default_factory=list)

    def read(self, line: Line) -> Iterable[lf.Fact]:
        """Take in a line. The facts follow at the end of the log: only a second report shows whether the job moved."""
        text = line.text
        report = self._report
        if "NCCL DIAG [" in text:
            self._diagnose(line)
        elif "PEER_DEAD: " in text:
            found = _PROCESS.search(text)
            if found is not None and len(self._deaths) < MOST_PROCESSES:
                who = RasProcess(pid=int(found["pid"]), node=found["node"]).who()
                self._deaths.append(lf.Absent(**line.says(who), shown=lf.Shown.COUNTS, dead=True))
        elif text.startswith("Job summary") or (text.startswith("Communicators...") and (not report or report.begun)):
            self._finish()
            self._report = RasReport(spot=line.spot(), time=line.time, begun=text.startswith("C"))
        elif report is not None:
            _take(report, text, line)
        return ()

    def end(self) -> Iterable[lf.Fact]:
        self._finish()
        # Ranks of the largest communicator that the diagnostics speak of are taken for those of the job.
        most = max((size for size, _ in self._diagnosed), default=0)
        facts = [*self._reports.judge(), *self._deaths]
        for size, fact in self._diagnosed:
            facts.append(fact if size in {0, most} else replace(fact, who=replace(fact.who, rank=None)))
        self._reports, self._deaths, self._diagnosed = RasReports(), [], []
        return facts

    def _finish(self) -> None:
        if self._report is not None:
            self._reports.add(self._report)
        self._report = None

    def _diagnose(self, line: Line) -> None:
        """Take in a line of NCCL's diagnostics. Values of variables are left out."""
        found = _DIAG.search(line.text)
        if found is None or len(self._diagnosed) >= _MOST_DIAGNOSED:
            return
        text = found["text"].strip()
        common: dict[str, Any] = {"spot": line.spot(), "time": line.time, "said": quote(text)}
        host = lf.Who(host=found["host"] or "")
        on = _ON_RANKS.search(text)
        ranks = [int(rank) for rank in re.findall(r"\d+", on["ranks"])[:MOST_PROCESSES]] if on is not None else []
        if found["tag"] == "OK" or _VALUE.match(text):
            facts: list[lf.Fact] = [] if _VALUE.match(text) else [_diagnostics_hint(text, common)]
        elif (edge := _EDGE.search(text)) is not None:
            path = f" over {edge['path']}" if edge["path"] else ""
            problem = (
                f"NCCL's check of GPU {edge['gpu']} (rank {edge['src']}) to GPU {edge['other']} (rank {edge['dst']})"
                f"{path} failed: {edge['what']}"
            )
            facts = [lf.Link(who=host, problem=problem, fix=_CHECK_P2P, **common)]
        elif (edges := _EDGES.search(text)) is not None and int(edges["passed"]) < int(edges["all"]):
            problem = f"only {edges['passed']} of {edges['all']} paths between GPUs passed NCCL's check"
            facts = [lf.Link(who=host, problem=problem, fix=_CHECK_P2P, **common)]
        elif text.startswith("ECC: uncorrected") and ranks:
            problem = "the GPU has uncorrected memory errors (ECC), according to NCCL's diagnostics"
            common = {**common, "kind": "xid", "problem": problem, "fix": _RESET}
            facts = [lf.Trouble(who=lf.Who(rank=rank), **common) for rank in ranks]
        elif text.startswith(("NVLink: inactive", "XGMI: inactive")) and ranks:
            problem = f"links between GPUs are inactive on {rank_list(ranks)}, according to NCCL's diagnostics"
            facts = [lf.Link(who=host, problem=problem, fix="check them: `nvidia-smi nvlink -s`, `dmesg -T`", **common)]
        elif (differs := _DIFFERS.search(text)) is not None:
            facts = [_diagnostics_hint(f"{differs['name']} differs between ranks", common)]
        else:
            facts = [_diagnostics_hint(text, common)]
        across = _ACROSS.search(text)
        self._diagnosed += [(int(across["all"]) if across is not None else 0, fact) for fact in facts]


_CHECK_P2P = (
    "check the path between these GPUs: `nvidia-smi topo -m`, `nvidia-smi nvlink -s`, `dmesg -T`; start the job with "
    "NCCL_P2P_DISABLE=1 to confirm, and disable PCIe ACS or the IOMMU if that helps"
)
_RESET = "drain the node; reset or replace the GPU: `nvidia-smi -q -d ECC`, `nvidia-smi --gpu-reset`"


def _diagnostics_hint(text: str, common: dict[str, Any]) -> lf.Hint:
    return lf.Hint(words=f"NCCL's diagnostics: {quote(text)}", kind="nccl-diagnostics", **common)


def _take(report: RasReport, text: str, line: Line) -> None:
    words = text.strip()
    if not words:
        report.side = None
    elif words.startswith("Communicators..."):
        report.begun = True
    elif words in _BLOCKS:
        report.block, report.comm, report.side = words, None, None
    elif (found := _COMM.search(words)) is not None:
        report.block, report.side = found["error"], None
        report.comm = report.communicator(found["hash"], int(found["group"]))
    elif words.startswith("Communicator ranks have different"):
        counts = _COUNTS.search(words)
        report.op, report.side = counts["op"] if counts is not None else "status", None
    elif (found := _GROUP.match(text)) is not None:
        ranks, comms = int(found["ranks"]), int(found["comms"])
        report.groups[int(found["group"])] = (ranks, comms, found["errors"], found["status"])
    elif not report.begun and (found := _JOB.match(text)) is not None:
        report.gpus = int(found["gpus"])
    else:
        _take_details(report, words, line)


def _take_details(report: RasReport, words: str, line: Line) -> None:
    spot, said, comm = line.spot(), quote(words), report.comm
    if (found := _PROCESS.search(words)) is not None:
        process = RasProcess(pid=int(found["pid"]), node=found["node"])
        report.lost.append((process, report.block == "DEAD", spot, said))
    elif comm is None:
        return
    elif (found := _SIDE.match(words)) is not None:
        report.side = _add_side(comm, report.op, found, int(found["count"]), spot, said)
    elif (found := _MISSING.search(words)) is not None:
        for number in re.findall(r"\d+", found["ranks"])[:MOST_PROCESSES]:
            comm.missing.setdefault(int(number), (None, spot, said))
    elif (found := _ONE.match(words)) is not None:
        rank = int(found["rank"])
        named = RasProcess(pid=int(found["pid"]), node=found["node"]) if found["pid"] else None
        if found["number"] or found["none"] or found["status"] or found["error"]:
            _add_side(comm, report.op, found, 1, spot, said).ranks[rank] = named
        elif report.block == "INCOMPLETE":
            comm.missing[rank] = (named, spot, said)
        elif report.side is not None and len(report.side.ranks) < MOST_PROCESSES:
            report.side.ranks[rank] = named


def _add_side(
    comm: RasCommunicator, op: str, found: re.Match[str], count: int, spot: lf.Spot, said: str
) -> Counted:  # fmt: skip
    status = found["status"] or found["error"] or ""
    side = Counted(op=op, number=int(found["number"] or 0), status=status, count=count, spot=spot, said=said)
    (comm.errors if found["error"] else comm.statuses if found["status"] else comm.counted).append(side)
    return side


def _read_json(document: Document) -> Found:
    text = document.body.decode("utf-8", "replace")
    text = _NO_COMMA.sub(lambda match: f",{match[0]}", text)
    found = Found(lines=text.count("\n") + 1)
    reports = RasReports()
    try:
        decoder, at = json.JSONDecoder(), text.find("{")
        while at >= 0:
            body, end = decoder.raw_decode(text, at)
            report = _of_json(body, lf.Spot(source=document.source, line=text.count("\n", 0, at) + 1))
            if report is not None:
                reports.add(report)
            at = text.find("{", end)
    except (ValueError, RecursionError):
        found.problem = "cut off" if document.cut or not text.rstrip().endswith("}") else "damaged JSON"
    found.facts = list(reports.judge())
    return found


# RAS's JSON (NCCL 2.28.7 and newer). Several reports may follow each other in one file, behind lines of its protocol.
RAS_JSON = DocumentFormat(
    "NCCL RAS report",
    lambda head: b'"communicators"' in head and b'"nccl_version"' in head and b"{" in head[:512],
    _read_json,
)


def _of_json(body: Any, spot: lf.Spot) -> RasReport | None:
    """Return a report, or None if it is not one. Values of the wrong type are left out."""
    if not isinstance(body, dict) or not isinstance(body.get("communicators"), list):
        return None
    report = RasReport(spot=spot, time=None, begun=True, exact=True)
    for communicator in body["communicators"]:
        if isinstance(communicator, dict):
            _json_communicator(report, communicator)
    every = (process for comm in report.communicators.values() for process in comm.processes.values())
    processes = {process for process in every if process is not None}
    report.gpus = max([len(processes), *(comm.size or 0 for comm in report.communicators.values())], default=None)
    return report


def _json_communicator(report: RasReport, body: dict[str, Any]) -> None:
    comm = report.communicator(str(body.get("hash", "")), None)
    comm.size = _whole_number(body.get("size"))
    for member in _dicts(body.get("ranks"))[:MOST_PROCESSES]:
        rank, process = _whole_number(member.get("rank")), _json_process(member)
        if rank is None:
            continue
        comm.processes[rank] = process
        counts = member.get("collective_counts")
        if isinstance(counts, dict):
            numbers = {str(op): _whole_number(value) for op, value in counts.items()}
            comm.counts[rank] = {op: number for op, number in numbers.items() if number is not None}
        status = member["status"] if isinstance(member.get("status"), dict) else {}
        codes = [_whole_number(status.get(name)) for name in ("init_state", "async_error")]
        comm.unready += [rank] if codes[0] == _IN_PROGRESS else []
        for words in filter(None, (_ERRORS.get(code or 0) for code in codes)):
            said = f"rank {rank}: {words}"
            comm.errors.append(Counted(
                op="error", status=words, number=0, count=1, spot=report.spot, said=said, ranks={rank: process}
            ))  # fmt: skip
    for member in _dicts(body.get("missing_ranks"))[:MOST_PROCESSES]:
        rank = _whole_number(member.get("rank"))
        status = member.get("status")
        dead = isinstance(status, dict) and bool(status.get("considered_dead"))
        answers = isinstance(status, dict) and status.get("unresponsive") is False and not dead
        if rank is not None:
            process = _json_process(member)
            words = "is considered dead" if dead else "lacks this communicator" if answers else "does not answer RAS"
            comm.processes[rank] = process
            comm.missing[rank] = (process, report.spot, f"rank {rank} {words}")


_IN_PROGRESS = 7
# ncclResult_t.
_ERRORS = {
    1: "Unhandled CUDA error", 2: "Unhandled system error", 3: "Internal error", 4: "Invalid argument",
    5: "Invalid usage", 6: "Remote process exited or network error",
}  # fmt: skip


def _json_process(member: dict[str, Any]) -> RasProcess | None:
    pid, host = _whole_number(member.get("pid")), member.get("host")
    return RasProcess(pid=pid, node=host) if pid is not None and isinstance(host, str) else None


def _whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
