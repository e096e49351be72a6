"""Raises an error whose text cannot be had."""


class BrokenError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


print("raises", flush=True)
raise BrokenError
