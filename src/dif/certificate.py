"""Where `dif.certificate` was documented to be."""

from dif.optimality.certificate import *  # noqa: F403
