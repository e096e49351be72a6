"""Reads reports of ``check-env``. NCCL's log is compared to the facts about machines in them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ddpdoctor.evidence.reader import Found
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.evidence import Spot, Who
from ddpdoctor.model.nccl_paths import MachineSeen
from ddpdoctor.model.node import Node

if TYPE_CHECKING:
    from ddpdoctor.evidence.reader import Document

_MARK = re.compile(rb'^\s*\{\s*"schema_version": \d+,\s*"tool": \{\s*"name": "ddpdoctor"')


class MachineFactsReader:
    """Reads the facts about machines in a report.json of ``check-env``."""

    name = "report of check-env"

    def recognizes(self, head: bytes) -> bool:
        """Return whether it is a report of ddpdoctor."""
        return _MARK.match(head) is not None

    def read(self, document: Document) -> Found:
        """Return the machines that the report has facts about."""
        try:
            plain = json.loads(document.body).get("data", {}).get("nodes")
            nodes = [decode(Node, one) for one in plain or ()]
        except (ValueError, AttributeError, TypeError, RecursionError, WrongValue) as error:
            return Found(problem=f"damaged ({type(error).__name__})")
        spot = Spot(source=document.source)
        facts = [MachineSeen(who=Who(host=node.host), spot=spot, node=node) for node in nodes]
        return Found(facts=[*facts], problem="" if nodes else "a report without facts about machines")
