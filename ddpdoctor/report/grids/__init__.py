"""Grids of a report: members in columns, and what was found of each in rows."""
