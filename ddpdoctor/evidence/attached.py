"""Reads what ``attach`` saved of a running job. The files may come from another machine, and are not trusted."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.reader import Found
from ddpdoctor.evidence.stacks import stacks_of_json
from ddpdoctor.model.attached import FORMAT, AskedNodes, AttachedJob, Movement, RankLook, SeenRank
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.evidence import Hint, Moving, ProcessState, Refused, Seen, Size, Spot, Who

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.evidence.reader import Document
    from ddpdoctor.model.attached import Refusal
    from ddpdoctor.model.evidence import Fact

_OF_NODE = re.compile(r"/nodes/\d+$")  # the folder of another node, in the run folder of the job
_RECORDS: dict[str, Any] = {"job": AttachedJob, "look": RankLook, "nodes": AskedNodes}


class AttachReader:
    """Reads ``attach.json`` and the looks at ranks. The store's keys are not needed for a verdict."""

    name = "attach"

    def recognizes(self, head: bytes) -> bool:
        """Return whether the file begins with the mark of ``attach``."""
        return head.lstrip().startswith(b"{") and f'"format": "{FORMAT}"'.encode() in head[:200]

    def read(self, document: Document) -> Found:
        """Return the ranks, their stacks and states, and whether the job moved."""
        try:
            plain = json.loads(document.body)
            record = _RECORDS.get(plain.get("kind"))
            read = decode(record, plain) if record is not None else None
            spot = Spot(source=document.source)
            facts: list[Fact] = []
            if isinstance(read, AttachedJob):
                facts = [*_of_job(read, spot)]
            elif isinstance(read, RankLook):
                facts = [*_of_look(read, spot, document.source)]
            elif isinstance(read, AskedNodes):
                facts = [_refused(refusal, Who(), spot) for refusal in read.unseen()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, WrongValue) as error:
            return Found(problem=f"damaged ({type(error).__name__})")
        return Found(facts=facts, attached=read if isinstance(read, AttachedJob | AskedNodes) else None)


def _of_job(job: AttachedJob, spot: Spot) -> Iterator[Fact]:
    if job.world_size is not None:
        yield Size(spot=spot, ranks=job.world_size)
    for rank in job.ranks:
        yield Seen(who=_who(rank, job.host), spot=spot)
    if job.movement is Movement.MOVING:
        # Not only by its stacks: a rank may be seen at one line twice, in two different steps.
        for rank in job.ranks:
            yield Moving(who=_who(rank, job.host), spot=spot)
    for folder in {_OF_NODE.sub("", rank.wrap_folder) for rank in job.ranks if rank.wrap_folder is not None}:
        yield Hint(spot=spot, words=f"the job runs under `ddpdoctor wrap`; its run folder is {folder}", kind="wrap")
    for refusal in job.refused:
        yield _refused(refusal, Who(host=job.host), spot)


def _of_look(look: RankLook, spot: Spot, source: str) -> Iterator[Fact]:
    who = _who(look.rank, look.host)
    yield Seen(who=who, spot=spot)
    if look.process is not None:
        yield ProcessState(who=who, spot=spot, letter=look.process.state)
    if isinstance(look.stacks, list):
        yield from stacks_of_json(look.stacks, who, source)
    for child in look.process.children if look.process is not None else ():
        if isinstance(child.stacks, list):
            # Other children of a rank, such as compile workers, hold up nobody.
            yield from (one for one in stacks_of_json(child.stacks, who, source) if one.worker)
    for refusal in look.refused:
        yield _refused(refusal, who, spot)


def _refused(refusal: Refusal, who: Who, spot: Spot) -> Refused:
    return Refused(who=who, spot=spot, source=refusal.source, reason=refusal.reason, remedy=refusal.remedy)


def _who(rank: SeenRank, host: str) -> Who:
    return Who(rank=rank.rank, local_rank=rank.local_rank, host=host, pid=rank.pid)
