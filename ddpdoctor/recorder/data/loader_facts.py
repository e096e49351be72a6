"""Describes a DataLoader: its dataset, its sampler, its sizes, and the user's line that loops over it."""

from __future__ import annotations

import sys
from typing import Any, Dict, Optional

from .. import frames
from . import dataset_digest, digests, samplers


def describe(loader: Any, number: int) -> Dict[str, Any]:
    """Return the journal entry of loader ``number`` of this process."""
    given = digests.attributes(loader)
    iterable = bool(given.get("_dataset_kind"))  # _DatasetKind.Iterable is 1, Map is 0
    return {
        "k": "loader",
        "n": number,
        "site": frames.describe_user(sys._getframe()),
        "ds": samplers.class_name(given.get("dataset")),
        "dp": dataset_digest.digest_of(given.get("dataset")),
        "N": None if iterable else samplers.length_of(given.get("dataset")),
        "bs": _batch_size(given),
        "dl": given.get("drop_last") if isinstance(given.get("drop_last"), bool) else None,
        "it": int(iterable),
        "w": given.get("num_workers") if isinstance(given.get("num_workers"), int) else 0,
        "sampler": None if iterable else samplers.describe(loader),
        **_part(given.get("dataset")),
    }


def _part(dataset: Any) -> Dict[str, Any]:
    """Return, for a torch Subset, the digests of the whole dataset and of the chosen indices."""
    if type(dataset) is not getattr(sys.modules.get("torch.utils.data.dataset"), "Subset", None):
        return {}
    given = digests.attributes(dataset)
    return {
        "of": dataset_digest.digest_of(given.get("dataset")),
        "part": dataset_digest.digest_of(given.get("indices")),
    }


def _batch_size(given: Dict[str, Any]) -> Optional[int]:
    """Return the batch size of the loader, or of its batch sampler if it was given one."""
    for found in (given.get("batch_size"), digests.attributes(given.get("batch_sampler")).get("batch_size")):
        if type(found) is int:
            return found
    return None
