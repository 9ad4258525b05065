"""Results for people: the report, its page, plots, and the file that describes a model."""

from dif.report.report import *  # noqa: F403
