"""Keeps the documented import path `dif.plots`; the code is in `dif.report.plots`."""

from dif.report.plots import *  # noqa: F403
