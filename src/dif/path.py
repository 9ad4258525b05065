"""Keeps the documented import path `dif.path`; the code is in `dif.solving.continuation`."""

from dif.solving.continuation import Event, Path

__all__ = ["Event", "Path"]
