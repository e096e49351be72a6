"""Formats of a report, with one file per format."""
