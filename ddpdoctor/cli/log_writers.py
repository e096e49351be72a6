"""Writes one report into one log: ``python -m ddpdoctor.cli.log_writers``, with what to write as JSON on stdin."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
"""Nobody asked for these libraries' reports of their own use here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a log gets."""

    verdict: str
    """The verdict in one sentence with its code, or the first finding if there is no verdict."""
    step: int
    """The last step of the job."""
    has_finished: bool
    """Whether the job ended well."""
    text: str
    """The report, as Markdown."""


def write_to_tensorboard(place: Mapping[str, str], entry: Entry) -> None:
    """Write an event file of its own, with the report as a text that TensorBoard shows."""
    import time

    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    if not Path(place["folder"]).is_dir():
        raise SystemExit(f"its folder {place['folder']} is gone")
    writer = EventFileWriter(place["folder"], filename_suffix=".ddpdoctor")
    writer.add_event(Event(wall_time=time.time(), step=entry.step, summary=text_pb("ddpdoctor/report", entry.text)))
    writer.close()


def write_to_wandb(place: Mapping[str, str], entry: Entry) -> None:
    """Resume the run and add the verdict and the report. The run counts as failed if the job failed."""
    import html

    import wandb

    settings = wandb.Settings(
        base_url=place["base_url"], console="off", disable_code=True, disable_git=True, x_disable_meta=True,
        x_disable_stats=True,
    )  # fmt: skip
    with wandb.init(
        id=place["id"], project=place["project"], entity=place["entity"] or None, dir=place["folder"],
        mode="offline" if place["mode"] == "offline" else "online", resume="allow", settings=settings,
    ) as run:  # fmt: skip
        run.log({"ddpdoctor/report": wandb.Html(f"<pre>{html.escape(entry.text)}</pre>", inject=False)})
        run.summary["ddpdoctor/verdict"] = entry.verdict
        run.finish(exit_code=0 if entry.has_finished else 1)


def write_to_mlflow(place: Mapping[str, str], entry: Entry) -> None:
    """Add the verdict to the run as a tag and the report as an artifact; the run keeps its status."""
    os.chdir(place["folder"])  # addresses of files may be relative
    from mlflow import MlflowClient

    client = MlflowClient(place["tracking_uri"] or None)
    client.log_text(place["id"], entry.text, "ddpdoctor/report.md")
    client.set_tag(place["id"], "ddpdoctor.verdict", entry.verdict)


WRITERS: Mapping[str, Callable[[Mapping[str, str], Entry], None]] = {
    "tensorboard": write_to_tensorboard, "wandb": write_to_wandb, "mlflow": write_to_mlflow,
}  # fmt: skip

if __name__ == "__main__":
    os.environ.update(QUIET)
    job = json.load(sys.stdin)
    WRITERS[job["name"]](job["place"], Entry(**job["entry"]))
