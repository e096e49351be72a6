"""Records where a rank logs its training, so that ``wrap --log-findings`` can put its findings there."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable, Dict, Set

from .. import hooks
from ..state import guarded, here
from ..wrappers import around, wraps

_noted: Set[str] = set()
"""Names of the loggers that were noted. Only the first use of each counts: TensorBoard's ``add_hparams`` makes a writer
for each call."""


def patch_tensorboard(module: Any) -> None:
    """Patch torch.utils.tensorboard.writer: note the folder of the first writer."""
    owner = getattr(module, "SummaryWriter", None)
    hooks.put(owner, "__init__", lambda original: around(original, after=_made_writer), is_api=True)


def patch_wandb(module: Any) -> None:
    """Patch wandb: note the first run."""
    hooks.put(module, "init", lambda original: _then(original, _began_wandb), is_api=True)


def patch_mlflow(module: Any) -> None:
    """Patch mlflow.tracking.fluent: note the first run."""
    hooks.put(module, "start_run", lambda original: _then(original, _began_mlflow), is_api=True)


def patch_mlflow_client(module: Any) -> None:
    """Patch mlflow.tracking.client, which frameworks use: note the first run."""
    owner = getattr(module, "MlflowClient", None)
    hooks.put(owner, "create_run", lambda original: _then(original, _began_mlflow), is_api=True)


def _then(original: Any, after: Callable[..., None]) -> Any:
    """Return a function that also calls ``after`` with its result and its arguments. It must not raise."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        after(result, *args)
        return result

    return run


@guarded("tensorboard")
def _made_writer(writer: Any) -> None:
    _note("tensorboard", folder=os.path.abspath(os.fspath(writer.log_dir)))


@guarded("wandb")
def _began_wandb(run: Any, *args: Any) -> None:
    from ..storage.secrets import hide_in_text

    settings = run.settings
    if settings.mode == "disabled":
        return
    _note(
        "wandb", id=run.id, project=run.project, entity=run.entity or "", folder=os.path.abspath(settings.root_dir),
        mode="offline" if run.offline else "online",
        base_url=hide_in_text(str(settings.base_url)),
    )  # fmt: skip


@guarded("mlflow")
def _began_mlflow(run: Any, *args: Any) -> None:
    """Note a run. The first argument is the client, if there is one.

    An address with a password is left out, so that it is stored nowhere.
    """
    uri = str(getattr(args[0] if args else None, "tracking_uri", None) or sys.modules["mlflow"].get_tracking_uri())
    _note("mlflow", id=run.info.run_id, tracking_uri="" if "@" in uri else uri, folder=os.getcwd())


def _note(logger: str, **place: str) -> None:
    if here.ring is None or not here.is_rank or logger in _noted:
        return
    _noted.add(logger)
    entry: Dict[str, Any] = {"k": "logger", "logger": logger, "place": place, "at": time.monotonic_ns()}
    here.ring.note(entry)
