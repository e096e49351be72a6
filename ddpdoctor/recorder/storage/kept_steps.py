"""Chooses which steps of the whole run a ring keeps: an even sample, and the longest."""

from __future__ import annotations

from . import ring_layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List


_GOLDEN = 0x9E3779B1
_WORD = 0xFFFFFFFF


def is_sampled(number: int, bits: int) -> bool:
    """Return whether a step belongs to the sample of one step in ``2 ** bits``.

    Multiplicative hashing (Knuth, The Art of Computer Programming, 6.4) spreads the sample evenly, also over steps that
    come back every N-th time, such as an evaluation. A sample of every 8th step might have all of them, or none.
    """
    return not (number * _GOLDEN & _WORD) >> (32 - min(bits, 32))


class KeptSteps:
    """The places of the kept steps.

    When the sample is full, it is halved, and the steps that leave it give their places to new ones. All ranks number
    their steps alike, so they keep the same ones.
    """

    __slots__ = ("_free", "_longest", "_numbers", "_shortest", "bits")

    def __init__(self) -> None:
        self.bits = 0
        """The sample has one step in ``2 ** bits``."""
        self._numbers: List[int] = [0] * ring_layout.SAMPLED_STEPS
        self._free: List[int] = list(range(ring_layout.SAMPLED_STEPS))[::-1]
        self._longest: List[int] = []
        self._shortest = -1
        """The shortest of the longest steps once their places are taken, else -1."""

    def places(self, number: int, wall_us: int) -> List[int]:
        """Return the places at which a step that took ``wall_us`` is to be written; mostly none."""
        found = []
        if is_sampled(number, self.bits):
            while not self._free:
                self._halve()
            if is_sampled(number, self.bits):
                place = self._free.pop()
                self._numbers[place] = number
                found.append(place)
        if wall_us > self._shortest:
            found.append(ring_layout.SAMPLED_STEPS + self._replace_shortest(wall_us))
        return found

    def _halve(self) -> None:
        self.bits += 1
        self._free = [place for place, number in enumerate(self._numbers) if not is_sampled(number, self.bits)]

    def _replace_shortest(self, wall_us: int) -> int:
        longest = self._longest
        if len(longest) < ring_layout.LONGEST_STEPS:
            longest.append(wall_us)
            place = len(longest) - 1
        else:
            place = longest.index(min(longest))  # a signal handler may have cut off the last call of this
            longest[place] = wall_us
        if len(longest) == ring_layout.LONGEST_STEPS:
            self._shortest = min(longest)
        return place
