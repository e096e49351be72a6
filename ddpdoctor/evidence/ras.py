"""Reports of NCCL's RAS subsystem (``ncclras``, NCCL 2.24 and newer), as text in any log, or as JSON.

Since NCCL 2.31 also the lines "NCCL DIAG" of its diagnostics (``ncclras -D``, NCCL_RUN_DIAGNOSTICS,
NCCL_RUN_RAS_DIAGNOSTICS), which only inform: the job goes on.

A report counts which operations each rank of a communicator has launched. In text it names the rarer side, which may be
the one that is ahead: the lower count is behind. Ranks are the communicator's, and nodes are addresses.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.evidence.ras_report import (
    Counted,
    LostProcess,
    RasCommunicator,
    RasProcess,
    RasReport,
    RasReports,
    split_node,
)
from ddpdoctor.evidence.reader import Found
from ddpdoctor.model.evidence import Absent, Hint, Link, Shown, Spot, Trouble, Who
from ddpdoctor.model.rank_words import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.evidence.reader import Document, Line
    from ddpdoctor.model.evidence import Fact

MOST_PROCESSES = 65_536
"""Our choice: no real job has a longer list of ranks."""
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
_NO_COMMA = re.compile(r"(?<=[\d\"el\]}])(?P<blank>\s+)(?=\"[^\"\n]{1,80}\"\s*:)|(?<=})(?P<gap>\s*)(?={)")
"""Where JSON lacks a comma before the next key or object, as that of NCCL 2.28.9 in each of its ``missing_ranks``."""


@dataclass(slots=True)
class _Text:
    """Reads the text of a report line by line."""

    block: str = ""
    """"INCOMPLETE", "DEAD" or a communicator's error: what indented lines belong to."""
    comm: RasCommunicator | None = None
    op: str = ""
    side: Counted | None = None
    """The state that the next ranks in the text share."""


class RasReader:
    """Finds RAS's text in logs and files."""

    name = "NCCL RAS report"
    triggers = (b"Job summary", b"Communicators...", b"managing GPU", b"managed by process", b"NCCL DIAG")

    def __init__(self) -> None:
        self._report: RasReport | None = None
        self._begin()

    def read(self, line: Line) -> Iterable[Fact]:
        """Take in a line. Facts come at the end of the log, because a second report says whether the job moved."""
        text = line.text
        report = self._report
        if "NCCL DIAG [" in text:
            self._diagnose(line)
        elif "PEER_DEAD: " in text:
            self._dead(line)
        elif text.startswith("Job summary") or (text.startswith("Communicators...") and (not report or report.begun)):
            self._finish()
            self._report = RasReport(spot=line.spot(), time=line.time, begun=text.startswith("C"))
            self._text = _Text()
        elif report is not None:
            _take(self._text, report, text, line)
        return ()

    def end(self) -> Iterable[Fact]:
        """Return what the last report says, and whether the job moved since the one before it."""
        self._finish()
        facts = [*self._reports.judge(), *self._deaths, *self._whole_job()]
        self._begin()
        return facts

    def _begin(self) -> None:
        self._text = _Text()
        self._reports = RasReports()
        self._deaths: list[Fact] = []
        self._diagnosed: list[tuple[int, Fact]] = []
        """What NCCL's diagnostics say, and how many ranks the communicator has that it is about."""

    def _finish(self) -> None:
        if self._report is not None:
            self._reports.add(self._report)
        self._report = None

    def _dead(self, line: Line) -> None:
        """Take in an event of RAS's monitor."""
        found = _PROCESS.search(line.text)
        if found is not None and len(self._deaths) < MOST_PROCESSES:
            host, address = split_node(found["node"])
            who = Who(host=host, address=address, pid=int(found["pid"]))
            said = quote(line.text)
            self._deaths.append(
                Absent(who=who, spot=line.spot(), time=line.time, said=said, shown=Shown.COUNTS, dead=True)
            )

    def _diagnose(self, line: Line) -> None:
        """Take in a line of NCCL's diagnostics. Values of variables are left out."""
        found = _DIAG.search(line.text)
        if found is None or len(self._diagnosed) >= _MOST_DIAGNOSED:
            return
        text = found["text"].strip()
        common: dict[str, Any] = {"spot": line.spot(), "time": line.time, "said": quote(text)}
        host = Who(host=found["host"] or "")
        on = _ON_RANKS.search(text)
        ranks = [int(rank) for rank in re.findall(r"\d+", on["ranks"])[:MOST_PROCESSES]] if on is not None else []
        if found["tag"] == "OK" or _VALUE.match(text):
            facts: list[Fact] = [] if _VALUE.match(text) else [_note(text, common)]
        elif (edge := _EDGE.search(text)) is not None:
            path = f" over {edge['path']}" if edge["path"] else ""
            problem = (
                f"NCCL's check of GPU {edge['gpu']} (rank {edge['src']}) to GPU {edge['other']} (rank {edge['dst']})"
                f"{path} failed: {edge['what']}"
            )
            facts = [Link(who=host, problem=problem, fix=_CHECK_P2P, **common)]
        elif (edges := _EDGES.search(text)) is not None and int(edges["passed"]) < int(edges["all"]):
            problem = f"only {edges['passed']} of {edges['all']} paths between GPUs passed NCCL's check"
            facts = [Link(who=host, problem=problem, fix=_CHECK_P2P, **common)]
        elif text.startswith("ECC: uncorrected") and ranks:
            problem = "the GPU has uncorrected memory errors (ECC), as NCCL's diagnostics say"
            facts = [Trouble(who=Who(rank=rank), kind="xid", problem=problem, fix=_RESET, **common) for rank in ranks]
        elif text.startswith(("NVLink: inactive", "XGMI: inactive")) and ranks:
            problem = f"links between GPUs are inactive on {rank_list(ranks)}, as NCCL's diagnostics say"
            facts = [Link(who=host, problem=problem, fix="check them: `nvidia-smi nvlink -s`, `dmesg -T`", **common)]
        elif (differs := _DIFFERS.search(text)) is not None:
            facts = [_note(f"{differs['name']} differs between ranks", common)]
        else:
            facts = [_note(text, common)]
        across = _ACROSS.search(text)
        self._diagnosed += [(int(across["all"]) if across is not None else 0, fact) for fact in facts]

    def _whole_job(self) -> Iterator[Fact]:
        """Yield what the diagnostics say. Ranks of the largest communicator are taken for those of the job."""
        most = max((size for size, _ in self._diagnosed), default=0)
        for size, fact in self._diagnosed:
            yield fact if size in {0, most} else replace(fact, who=replace(fact.who, rank=None))


_CHECK_P2P = (
    "check the path between these GPUs: `nvidia-smi topo -m`, `nvidia-smi nvlink -s`, `dmesg -T`; start the job with "
    "NCCL_P2P_DISABLE=1 to confirm, and disable PCIe ACS or the IOMMU if that helps"
)
_RESET = "drain the node; reset or replace the GPU: `nvidia-smi -q -d ECC`, `nvidia-smi --gpu-reset`"


def _note(text: str, common: dict[str, Any]) -> Hint:
    return Hint(words=f"NCCL's diagnostics: {quote(text)}", kind="nccl-diagnostics", **common)


def _take(state: _Text, report: RasReport, text: str, line: Line) -> None:
    """Take one line into the report."""
    words = text.strip()
    if not words:
        state.side = None
        return
    if words.startswith("Communicators..."):
        report.begun = True
    elif words in _BLOCKS:
        state.block, state.comm, state.side = words, None, None
    elif (found := _COMM.search(words)) is not None:
        state.block, state.side = found["error"], None
        state.comm = report.communicator(found["hash"], int(found["group"]))
    elif words.startswith("Communicator ranks have different"):
        counts = _COUNTS.search(words)
        state.op = counts["op"] if counts is not None else "status"
        state.side = None
    elif (found := _GROUP.match(text)) is not None:
        ranks, comms = int(found["ranks"]), int(found["comms"])
        report.groups[int(found["group"])] = (ranks, comms, found["errors"], found["status"])
    elif not report.begun and (found := _JOB.match(text)) is not None:
        report.gpus = int(found["gpus"])
    else:
        _details(state, report, words, line)


def _details(state: _Text, report: RasReport, words: str, line: Line) -> None:
    """Take in an indented line: a process, a side of a communicator, or a rank by its name."""
    spot, said, comm = line.spot(), quote(words), state.comm
    if (found := _PROCESS.search(words)) is not None:
        process = RasProcess(pid=int(found["pid"]), node=found["node"])
        report.lost.append(LostProcess(process=process, dead=state.block == "DEAD", spot=spot, said=said))
    elif comm is None:
        return
    elif (found := _SIDE.match(words)) is not None:
        state.side = _counted(state, found, int(found["count"]), spot, said)
        _list_of(comm, found).append(state.side)
    elif (found := _MISSING.search(words)) is not None:
        for rank in re.findall(r"\d+", found["ranks"])[:MOST_PROCESSES]:
            comm.missing.setdefault(int(rank), (None, spot, said))
    elif (found := _ONE.match(words)) is not None:
        rank, named = int(found["rank"]), _process(found)
        if found["number"] or found["none"] or found["status"] or found["error"]:
            one = _counted(state, found, 1, spot, said)
            one.ranks[rank] = named
            _list_of(comm, found).append(one)
        elif state.block == "INCOMPLETE":
            comm.missing[rank] = (named, spot, said)
        elif state.side is not None and len(state.side.ranks) < MOST_PROCESSES:
            state.side.ranks[rank] = named


def _counted(state: _Text, found: re.Match[str], count: int, spot: Spot, said: str) -> Counted:
    status = found["status"] or found["error"] or ""
    return Counted(op=state.op, number=int(found["number"] or 0), status=status, count=count, spot=spot, said=said)


def _list_of(comm: RasCommunicator, found: re.Match[str]) -> list[Counted]:
    if found["error"]:
        return comm.errors
    return comm.statuses if found["status"] else comm.counted


def _process(found: re.Match[str]) -> RasProcess | None:
    return RasProcess(pid=int(found["pid"]), node=found["node"]) if found["pid"] else None


class RasJsonReader:
    """Reads RAS's JSON (NCCL 2.28.7 and newer). Several reports may follow each other in one file."""

    name = "NCCL RAS report"

    def recognizes(self, head: bytes) -> bool:
        """Return whether it is JSON with RAS's keys. Lines of its protocol may stand before it."""
        return b'"communicators"' in head and b'"nccl_version"' in head and b"{" in head[:512]

    def read(self, document: Document) -> Found:
        """Return what the reports say, and what changed between them."""
        text = document.body.decode("utf-8", "replace")
        text = _NO_COMMA.sub(lambda match: f",{match[0]}", text)
        found = Found(lines=text.count("\n") + 1)
        reports = RasReports()
        try:
            for at, body in _objects(text):
                spot = Spot(source=document.source, line=text.count("\n", 0, at) + 1)
                report = _of_json(body, spot)
                if report is not None:
                    reports.add(report)
        except (ValueError, RecursionError):
            found.problem = "cut off" if document.cut or not text.rstrip().endswith("}") else "damaged JSON"
        found.facts = list(reports.judge())
        return found


def _objects(text: str) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        body, end = decoder.raw_decode(text, at)
        yield at, body
        at = text.find("{", end)


def _of_json(body: Any, spot: Spot) -> RasReport | None:
    """Return a report, or None if it is not one. Values of the wrong type are left out."""
    if not isinstance(body, dict) or not isinstance(body.get("communicators"), list):
        return None
    report = RasReport(spot=spot, time=None, begun=True, exact=True)
    for one in body["communicators"]:
        if isinstance(one, dict):
            _json_communicator(report, one)
    processes = {
        (process.node, process.pid)
        for comm in report.communicators.values()
        for process in comm.processes.values()
        if process is not None
    }
    report.gpus = max([len(processes), *(comm.size or 0 for comm in report.communicators.values())], default=None)
    return report


def _json_communicator(report: RasReport, body: dict[str, Any]) -> None:
    comm = report.communicator(str(body.get("hash", "")), None)
    comm.size = _number(body.get("size"))
    for one in _dicts(body.get("ranks"))[:MOST_PROCESSES]:
        rank, process = _number(one.get("rank")), _json_process(one)
        if rank is None:
            continue
        comm.processes[rank] = process
        counts = one.get("collective_counts")
        if isinstance(counts, dict):
            numbers = {str(op): _number(value) for op, value in counts.items()}
            comm.counts[rank] = {op: number for op, number in numbers.items() if number is not None}
        status = one.get("status")
        if isinstance(status, dict):
            _json_status(report, comm, rank, status)
    for one in _dicts(body.get("missing_ranks"))[:MOST_PROCESSES]:
        rank = _number(one.get("rank"))
        status = one.get("status")
        dead = isinstance(status, dict) and bool(status.get("considered_dead"))
        answers = isinstance(status, dict) and status.get("unresponsive") is False and not dead
        if rank is not None:
            process = _json_process(one)
            words = "is dead for RAS" if dead else "has not this communicator" if answers else "does not answer RAS"
            comm.processes[rank] = process
            comm.missing[rank] = (process, report.spot, f"rank {rank} {words}")


def _json_status(report: RasReport, comm: RasCommunicator, rank: int, status: dict[str, Any]) -> None:
    state, error = _number(status.get("init_state")), _number(status.get("async_error"))
    if state == _IN_PROGRESS:
        comm.unready.append(rank)
    for code in (state, error):
        if code in _ERRORS:
            words = _ERRORS[code]
            one = Counted(op="error", status=words, number=0, count=1, spot=report.spot, said=f"rank {rank}: {words}")
            one.ranks[rank] = comm.processes.get(rank)
            comm.errors.append(one)


_IN_PROGRESS = 7
_ERRORS = {
    1: "Unhandled CUDA error", 2: "Unhandled system error", 3: "Internal error", 4: "Invalid argument",
    5: "Invalid usage", 6: "Remote process exited or network error",
}  # fmt: skip
"""ncclResult_t."""


def _json_process(one: dict[str, Any]) -> RasProcess | None:
    pid, host = _number(one.get("pid")), one.get("host")
    return RasProcess(pid=pid, node=host) if pid is not None and isinstance(host, str) else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
