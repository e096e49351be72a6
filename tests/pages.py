"""Reports with every kind of picture for the tests of the page: made up, of realistic size, the same every time."""

from ddpdoctor.model.findings import Check, Confidence, Finding, JobStatus, JobSummary, Outcome, Place, Report, Severity
from ddpdoctor.model.pictures import (
    Lane,
    RankWaits,
    SourceExcerpt,
    Span,
    SpanKind,
    Timeline,
    TimelineEvent,
    WaitingRanks,
)
from ddpdoctor.report.blocks import (
    Bars,
    ChartLine,
    Content,
    Grid,
    GridCell,
    Heading,
    Places,
    RankClass,
    Series,
    Text,
    Tone,
    Tree,
    TreeNode,
)

STEP_MS = 180.0
STEPS = 60
DETAIL_STEPS = 12
LINE = "train.py:61 in main"
FAULT = "data.py:112 in load_shard"
FIX = "look at what rank 1 waits for in load_shard at data.py:112, and give it a time limit"


def step_spans(number, rank, *, detail):
    """One step of a healthy rank: a batch, forward, backward with four buckets, and the wait in the last of them."""
    at = number * STEP_MS
    late = 0.13 * (rank % 7)
    whole = Span(kind=SpanKind.STEP, start_ms=at, end_ms=at + STEP_MS - 1, label="step", number=number)
    parts = [
        Span(
            kind=SpanKind.BATCH,
            start_ms=at + late,
            end_ms=at + 14 + late,
            label="next batch",
            place="train.py:55 in main",
        ),
        Span(
            kind=SpanKind.FORWARD, start_ms=at + 14 + late, end_ms=at + 60, label="forward", place="train.py:58 in main"
        ),
        Span(kind=SpanKind.BACKWARD, start_ms=at + 60, end_ms=at + 160, label="backward", place=LINE),
    ]
    calls = [
        Span(
            kind=SpanKind.COLLECTIVE, start_ms=at + 80 + 22 * bucket + late, end_ms=at + 98 + 22 * bucket,
            label="all_reduce", group="default", number=4 * number + bucket,
            shape=f"float32 [{1024 * (bucket + 1)}, 16]", place=LINE,
        )
        for bucket in range(4)
    ]  # fmt: skip
    wait = Span(kind=SpanKind.WAIT, start_ms=at + 150, end_ms=at + 160, label="all_reduce", place=LINE)
    return (whole, *parts, *calls, wait) if detail else (whole,)


def lane(rank, ranks, culprit):
    end = STEPS * STEP_MS + 6000
    first = STEPS - DETAIL_STEPS
    coarse = tuple(
        Span(
            kind=SpanKind.CHECKPOINT if at == 20 else SpanKind.COLLECTIVE, start_ms=at * STEP_MS,
            end_ms=(at + 5) * STEP_MS - 20 - 0.1 * (rank % 9), label="save" if at == 20 else "20 all_reduce",
        )
        for at in range(0, STEPS, 5)
    )  # fmt: skip
    stands = rank in {culprit, 0, 1}
    numbers = range(first, STEPS) if stands else ()
    whole = tuple(span for number in numbers for span in step_spans(number, rank, detail=True))
    at = STEPS * STEP_MS
    if rank == culprit:
        last = (Span(kind=SpanKind.HOST, start_ms=at, end_ms=None, label="load_shard", place=FAULT),)
    else:
        call = {"label": "all_reduce", "place": LINE}
        last = (
            Span(kind=SpanKind.COLLECTIVE, start_ms=at + 80, end_ms=None, group="default", number=4 * STEPS,
                 shape="float32 [1024, 16]", **call),
            Span(kind=SpanKind.WAIT, start_ms=at + 82, end_ms=None, **call),
        )  # fmt: skip
    return Lane(
        rank=rank, host=f"node{rank * 4 // ranks}", state="in load_shard" if rank == culprit else "in all_reduce",
        blamed=rank == culprit, coarse=(*coarse, *last), detail=(*whole, *last) if stands else (),
    ), end  # fmt: skip


def timeline(ranks=8, culprit=1):
    lanes = [lane(rank, ranks, culprit) for rank in range(ranks)]
    end = lanes[0][1]
    others = tuple(rank for rank in range(ranks) if rank != culprit)
    return Timeline(
        started_at="2026-01-02T03:04:05.000+00:00", length_ms=end, detail_from_ms=(STEPS - DETAIL_STEPS) * STEP_MS,
        lanes=tuple(one for one, _ in lanes), classes=(others, (culprit,)),
        events=(TimelineEvent(at_ms=end - 900, label="the hang is certain", ranks=(culprit,)),),
    )  # fmt: skip


def graph(ranks=8):
    return RankWaits(
        classes=(
            WaitingRanks(ranks=(0, *range(2, ranks - 1)), state="in all_reduce", place=LINE, blamed=False),
            WaitingRanks(ranks=(ranks - 1,), state="in broadcast", place="train.py:70 in save", blamed=False),
            WaitingRanks(ranks=(1,), state="in load_shard", place=FAULT, blamed=True),
        ),
        links=((0, 2), (1, 0), (1, 2)),
    )


def tree(ranks=8):
    everyone, others = tuple(range(ranks)), tuple(rank for rank in range(ranks) if rank != 1)
    waiting = TreeNode(
        text="train.py:61 main",
        ranks=others,
        strong=True,
        children=(TreeNode(text="torch/autograd/__init__.py:354 backward", ranks=others),),
    )
    loading = TreeNode(
        text="train.py:55 main", ranks=(1,), strong=True,
        children=(
            TreeNode(text="torch/utils/data/dataloader.py:733 __next__", ranks=(1,), children=(
                TreeNode(text="data.py:112 load_shard", ranks=(1,), strong=True, blamed=True),)),
        ),
    )  # fmt: skip
    top = TreeNode(text="train.py:90 <module>", ranks=everyone, strong=True, children=(waiting, loading))
    return Tree(title="Stacks", roots=(top,))


SOURCE = SourceExcerpt(
    file="/home/me/project/data.py", first=109, blamed=112,
    lines=("def load_shard(name):", '    path = SHARDS / f"{name}.tar"', "    with lock:",
           "        data = fetch(path)  # slow", "    return decode(data)"),
)  # fmt: skip


def grid(rows=8, columns=10):
    def cell(row, column):
        if row == 1 and column >= 6:
            return GridCell(
                text="differs", tone=Tone.ERROR, about=f"rank {row} differs from the others at layers.{column}"
            )
        return GridCell(text="equal", tone=Tone.GOOD, about=f"rank {row}, layers.{column}: 0x{row * 97 + column:08x}")

    return Grid(
        title="Replicas by tensor", rows=tuple(f"rank {row}" for row in range(rows)),
        columns=tuple(f"layers.{column}.weight" for column in range(columns)),
        cells=tuple(tuple(cell(row, column) for column in range(columns)) for row in range(rows)),
        row_name="rank", column_name="tensor", legend=("differs: another value than most ranks have",),
    )  # fmt: skip


def heat(ends=8):
    cells = tuple(
        tuple(GridCell(text=f"{11.8 - abs(row - at) * 1.3:.1f}", level=abs(row - at) / ends, about=f"{row} to {at}")
              for at in range(ends)) for row in range(ends)
    )  # fmt: skip
    names = tuple(map(str, range(ends)))
    return Grid(title="Bandwidth between ranks, GB/s", rows=names, columns=names, cells=cells)


SERIES = Series(
    title="busbw in GB/s over size",
    lines=(
        ChartLine(name="all_reduce float32", points=tuple((2**p, 12 * 2**p / (2**p + 2**17)) for p in range(10, 31))),
        ChartLine(name="all_gather float32", points=tuple((2**p, 10 * 2**p / (2**p + 2**19)) for p in range(10, 31))),
    ),
    reference=ChartLine(name="100 Gbit/s network", points=((2**20, 11.5), (2**30, 11.5))),
)
BARS = Bars(
    title="usual step by rank", unit="ms", parts=("data loading", "forward", "waiting for ranks"),
    rows=(("rank 0", False, (12.0, 60.0, 40.5)), ("rank 1", True, (52.5, 60.0, 0.0))),
)  # fmt: skip
STUCK = Finding(
    code="DD601", kind="stuck", severity=Severity.ERROR, confidence=Confidence.HIGH, ranks=(1,), hosts=("node0",),
    summary="rank 1 makes no progress in load_shard at data.py:112 while ranks 0, 2-7 wait for it in all_reduce",
    where=(Place(rank=1, file="/home/me/project/data.py", line=112, function="load_shard"),), step=60,
    evidence=("rank 1 runs its own code, data.py:112", "ranks 0, 2-7 wait in all_reduce, train.py:61, for 5.8 s",
              "process 10418 is sleeping (S), at about 0% of a core"),
    fix=FIX,
)  # fmt: skip
OTHERS = tuple(
    Finding(
        code=f"DD80{number}", kind=kind, severity=Severity.WARNING, confidence=Confidence.MEDIUM, summary=summary,
        fix=fix, evidence=("seen in 58 of 60 steps",),
    )
    for number, kind, summary, fix in (
        (1, "input-bound", "the data loader takes 14 ms of a step of 180 ms", "num_workers=4"),
        (2, "bucket-size", "buckets of 25 MiB are too small here", "bucket_cap_mb=60"),
        (3, "overlap", "the last bucket is reduced after backward", "gradient_as_bucket_view=True"),
        (5, "threads", "16 threads a rank on 8 cores", "export OMP_NUM_THREADS=1"),
    )
)  # fmt: skip
CHECKS = tuple(
    Check(id=kind, code=f"DD6{number:02d}", outcome=outcome, seen="" if reason else "8 ranks", reason=reason)
    for number, (kind, outcome, reason) in enumerate(
        (("stuck", Outcome.FAILED, ""), ("mismatch", Outcome.PASSED, ""), ("deadlock", Outcome.PASSED, ""),
         ("straggler", Outcome.SKIPPED, "fewer than 20 steps"),
         ("transport", Outcome.INCONCLUSIVE, "no stack of rank 3")),
        start=1,
    )
)  # fmt: skip


def content(ranks=8):
    """The content of a stuck job with every kind of picture."""
    places = Places(
        classes=(
            RankClass(ranks=tuple(rank for rank in range(ranks) if rank != 1), host="", state="in all_reduce",
                      place=f"{LINE}, step 60", blamed=False),
            RankClass(ranks=(1,), host="node0", state="in load_shard", place="data.py:112 in load_shard, step 60",
                      blamed=True),
        )
    )  # fmt: skip
    return Content(
        headline=STUCK.summary, status=f"hung, {ranks} ranks, exit status 124",
        sections=((places,), (Heading(text="compared replicas"), Text(text="equal up to step 59"))),
        ends_with_verdict=True, others=OTHERS,
        draw_pictures=lambda: (
            timeline(ranks), graph(ranks), SOURCE, tree(ranks), grid(min(ranks, 60)), heat(), SERIES, BARS,
        ),
    )  # fmt: skip


def report(data=None):
    return Report(
        command=("ddpdoctor", "wrap", "--nproc-per-node", "8", "train.py"), started_at="2026-01-02T03:04:05.000+00:00",
        ended_at="2026-01-02T03:04:35.000+00:00",
        job=JobSummary(world_size=8, nnodes=1, status=JobStatus.HUNG, exit_status=124), verdict=STUCK,
        findings=(STUCK, *OTHERS), checks=CHECKS, ranks=(), data=data or {}, tool_version="1.2.3",
    )  # fmt: skip
