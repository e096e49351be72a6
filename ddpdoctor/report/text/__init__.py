"""The text report: pages of plain lines for a terminal or a pipe."""
