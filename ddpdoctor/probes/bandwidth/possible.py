"""Refuses what a backend cannot reduce, before anything is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.bandwidth.cases import possible, reducible

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Settings


def check_possible(settings: Settings) -> None:
    """Raise ``UserError`` if the backend cannot reduce a dtype with the operator."""
    if not any(collective.reduces for collective in settings.collectives):
        return
    for dtype in settings.dtypes:
        if not reducible(settings.backend, dtype, settings.redop):
            raise UserError(
                f"{settings.backend} cannot reduce {dtype} with {settings.redop}", help=possible(settings.backend)
            )
