"""Keeps the documented import path `dif.certificate`; the code is in `dif.optimality.certificate`."""

from dif.optimality.certificate import *  # noqa: F403
