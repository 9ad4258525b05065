"""Where `dif.path` was documented to be: the solution followed along a path."""

from dif.solving.continuation import *  # noqa: F403
