"""Reports: a page and tables about finished or unfinished runs, made from their folders."""

from atoll.report.page import write_report

__all__ = ["write_report"]
