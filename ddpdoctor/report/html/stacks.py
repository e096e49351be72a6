"""Turns a tree of frames into steps for a template, however deep it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ddpdoctor.report.blocks import Tree, TreeNode


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameStep:
    """What a template writes next: the start of frames that can be folded, a frame, a fork, or an end."""

    kind: Literal["open", "frame", "fork", "close"]
    node: TreeNode


def list_frames(tree: Tree) -> tuple[FrameStep, ...]:
    """Return the steps in order. Frames in a row that the same ranks are in stand below each other, not nested."""
    steps: list[FrameStep] = []
    todo = [FrameStep(kind="frame", node=root) for root in reversed(tree.roots)]
    while todo:
        step = todo.pop()
        if step.kind != "frame":
            steps.append(step)
            continue
        row = _row_from(step.node)
        last = row[-1]
        if len(row) == 1 and not last.children:
            steps.append(step)
            continue
        steps.append(FrameStep(kind="open", node=row[0]))
        steps += [FrameStep(kind="frame", node=node) for node in row[1:]]
        todo.append(FrameStep(kind="close", node=last))
        if last.children:
            steps.append(FrameStep(kind="fork", node=last))
            todo += [FrameStep(kind="frame", node=child) for child in reversed(last.children)]
    return tuple(steps)


def _row_from(node: TreeNode) -> list[TreeNode]:
    row = [node]
    while len(row[-1].children) == 1 and row[-1].children[0].ranks == row[-1].ranks:
        row.append(row[-1].children[0])
    return row
