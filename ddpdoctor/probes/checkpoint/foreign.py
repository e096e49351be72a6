"""Names the usual files that are found where a checkpoint should be."""

from __future__ import annotations

_BEGINNINGS = (
    (b"version https://git-lfs", "a pointer of git-lfs: the file itself was not fetched (git lfs pull)"),
    (b"<!doctype html", "an HTML page, as a server sends where a download failed"),
    (b"<html", "an HTML page, as a server sends where a download failed"),
    (b"<?xml", "XML, as a storage server sends where a download failed"),
    (b"\x1f\x8b", "compressed by gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first"),
    (b"\x89hdf", "an HDF5 file, as Keras writes"),
    (b"\x93numpy", "an array of NumPy"),
    (b"gguf", "a GGUF file, as llama.cpp reads"),
)


def name_foreign(head: bytes) -> str:
    """Return a phrase that says what a file beginning with ``head`` is."""
    lowered = head.lstrip().lower() if head[:1].isspace() else head.lower()
    for beginning, what in _BEGINNINGS:
        if lowered.startswith(beginning):
            return what
    if not any(head):
        return "nothing but zeros at its beginning, as where a host went down before the data had reached the disk"
    return (
        f"it begins with {head[:8]!r}, which is neither a zip archive nor an old format of torch.save nor safetensors"
    )
