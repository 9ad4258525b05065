"""What users see: the report and its HTML page, plots, the file that describes a model. No estimates are made here."""

from dif.report.builder import Report, write_report

__all__ = ["Report", "write_report"]
