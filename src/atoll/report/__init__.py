"""A page of finished (or unfinished) runs, made from their folders alone."""

from atoll.report.page import write_report

__all__ = ["write_report"]
