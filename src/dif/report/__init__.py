"""What users see: the report, its HTML page and the plots."""

from dif.report.builder import Report, write_report

__all__ = ["Report", "write_report"]
