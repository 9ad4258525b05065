"""Results for users: the report and its HTML page, plots, and the file that describes a model."""

from dif.report.report import *  # noqa: F403
