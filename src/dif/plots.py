"""Where `dif.plots` was documented to be."""

from dif.report.plots import *  # noqa: F403
