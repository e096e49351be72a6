"""Merges the stacks of all ranks into a tree, as STAT does: each frame once, with the ranks that are in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.report.blocks import Tree, TreeNode
from ddpdoctor.report.lines import format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from ddpdoctor.model.findings import Finding, RankRow

MOST_FRAMES = 60  # our choice: the innermost frames of a longer stack, as of a recursion
MOST_NODES = 400  # Our choice: more nodes cannot be read. Ranks in other frames are then missing below a node.
_LIBRARY = re.compile(r"/(site-packages|dist-packages)/|/lib(64)?/python\d|^<frozen")
_PACKAGE = re.compile(r"^.*/(?:site-packages|dist-packages|python\d[\d.]*)/")
_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)", re.DOTALL)


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node that grows."""

    ranks: list[int] = field(default_factory=list)
    below: dict[str, _Node] = field(default_factory=dict)


def stack_tree(rows: tuple[RankRow, ...], verdict: Finding | None) -> Tree | None:
    """Return the merged stacks of the main threads, or None if no rank has one."""
    root = _Node()
    room = MOST_NODES
    for row in sorted(rows, key=lambda row: row.rank):
        node = root
        for frame in row.stack[-MOST_FRAMES:]:
            if frame not in node.below:
                if not room:
                    break
                room -= 1
                node.below[frame] = _Node()
            node = node.below[frame]
            node.ranks.append(row.rank)
    if not root.below:
        return None
    # The lines that the verdict names, each with its ranks
    found: dict[tuple[str, int], set[int]] = {}
    for place in verdict.where if verdict is not None else ():
        found.setdefault((place.file, place.line), set()).add(place.rank)
    return Tree(
        title="Stacks of the main threads",
        roots=tuple(_build(root.below, {line: frozenset(ranks) for line, ranks in found.items()})),
    )


def _build(
    below: Mapping[str, _Node], blamed: Mapping[tuple[str, int], AbstractSet[int]]
) -> Iterator[TreeNode]:  # fmt: skip
    """Yield nodes, those of the most ranks first."""
    for frame, node in sorted(below.items(), key=lambda item: (-len(item[1].ranks), item[1].ranks)):
        parts = _FRAME.fullmatch(frame)
        file, line = (parts["file"], int(parts["line"])) if parts and len(parts["line"]) < 10 else (frame, 0)
        place = f"{_PACKAGE.sub('', file)}:{line}" if line else file
        yield TreeNode(
            text=f"{place} in {parts['function']}" if parts else place,
            ranks=tuple(node.ranks),
            strong=not _LIBRARY.search(file),
            blamed=not blamed.get((file, line), frozenset()).isdisjoint(node.ranks),
            children=tuple(_build(node.below, blamed)),
        )


def draw_tree(tree: Tree) -> list[str]:
    """Return the lines of a tree in ASCII. It goes a level deeper only where ranks part."""
    return [line for root in tree.roots for line in _draw(root, 0, ())]


def _draw(node: TreeNode, depth: int, above: tuple[int, ...]) -> Iterator[str]:
    """Yield the lines of a node. Its ranks are named where they are not those of the node above."""
    ranks = f"  [{format_ranks(node.ranks)}]" if node.ranks != above else ""
    yield f"{'> ' if node.blamed else '  '}{'  ' * depth}{node.text}{ranks}"
    parts = len(node.children) > 1 or any(child.ranks != node.ranks for child in node.children)
    for child in node.children:
        yield from _draw(child, depth + parts, node.ranks)
