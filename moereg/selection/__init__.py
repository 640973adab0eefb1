"""Requests, requirements, decisions and selections: deciding on arguments alone."""

from moereg.selection.result import SCHEMA, SOURCES, Choice, Decision, Selection, Verdict, nearest_by_backend

__all__ = ["SCHEMA", "SOURCES", "Choice", "Decision", "Selection", "Verdict", "nearest_by_backend"]
