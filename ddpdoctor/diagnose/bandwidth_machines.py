"""Finds the job that a rank of the bench belongs to, and reads the job's machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.launch.launchers import seen_ranks
from ddpdoctor.collect.node import SECTIONS_FOR_BENCH, ReadingPlan
from ddpdoctor.collect.system import System
from ddpdoctor.diagnose.fleet import gather_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.model.node import Fleet


def find_launch(env: Mapping[str, str]) -> Launch:
    """Return the job of this process. Without a launcher, it is a job of one rank."""
    return seen_ranks(env)


class MachineReader:
    """Reads the machines when called. Rank 0 keeps the result in ``fleet``; on other ranks it stays None."""

    def __init__(self, launch: Launch, env: Mapping[str, str]) -> None:
        self._launch, self._env = launch, env
        self.fleet: Fleet | None = None

    def __call__(self, conversation: Conversation) -> None:
        """Take part in the reading. Every rank must call this. Raises ``StoreError``."""
        plan = ReadingPlan(sections=SECTIONS_FOR_BENCH, use_torch=False)
        self.fleet = gather_over(conversation.part("machines/"), self._launch, System(env=self._env), plan)
