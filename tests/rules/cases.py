"""Files of cases in tests/data: rows of facts, and below each, or below several with one outcome, what is said of them.

"==== HEAD" begins a case, "with ..." gives what all its rows have, "# " is a comment. Lines of a row after its first
are indented. What is said begins with "=> ", and goes on with a line for each finding and indented ones with its parts.
"""

from typing import NamedTuple

PARTS = ("error", "warning", "info", "  fix", "  evidence", "  ranks", "  hosts", "  confidence", "  kind", "  at")
OF_A_FINDING = tuple(f"{part}: " for part in PARTS)


class Block(NamedTuple):
    """Rows of a case that have one outcome."""

    head: str
    common: str
    rows: list[str]
    said: list[str]


def blocks(path):
    """Return the parts of a file: blocks, and all other lines as they stand."""
    head, common, rows, said = "", "", [], []
    lines = path.read_text(encoding="utf-8").split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(("=> ", *OF_A_FINDING)):
            said.append(line)
            if not following.startswith(OF_A_FINDING):
                yield Block(head, common, rows, said)
                rows, said = [], []
        elif line.startswith("  "):
            rows[-1] += "\n" + line
        elif line and not line.startswith(("# ", "with ", "==== ")):
            rows.append(line)
        else:
            if line.startswith("==== "):
                head, common = line[5:], ""
            common = line[5:] if line.startswith("with ") else common
            yield line


def rewrite(path, said_of):
    """Write what is said now below the rows of a file; ``said_of`` takes a block and one of its rows."""
    lines = []
    for block in blocks(path):
        if isinstance(block, str):
            lines.append(block)
            continue
        found = [said_of(block, row) for row in block.rows]
        for row, now, after in zip(block.rows, found, [*found[1:], None], strict=True):
            lines += [row] if now == after else [row, *now]
    path.write_text("\n".join(lines), encoding="utf-8")


def as_listed(block, lines, may_lack=("  evidence: ",)):
    """Return what is said, without such parts where the case has none of them."""
    left_out = tuple(part for part in may_lack if not any(line.startswith(part) for line in block.said))
    return [line for line in lines if not line.startswith(left_out)]
