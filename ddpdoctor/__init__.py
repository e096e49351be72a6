"""ddpdoctor: diagnoses distributed PyTorch training. Importing this package costs nothing."""

__version__ = "0.2.0"
__all__ = ["ConsistencyError", "ConsistencyResult", "TensorDifference", "check_consistency", "watch"]
_HOMES = {
    "check_consistency": ("ddpdoctor.probes.consistency.comparing", "check_consistency"),
    "watch": ("ddpdoctor.integrations.watch", "Watch"),
}


def __getattr__(name: str) -> object:
    """Import what is public when it is first asked for. Its types are in ``__init__.pyi``."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES.get(name, ("ddpdoctor.model.consistency", name))
    return getattr(importlib.import_module(module), attribute)
