"""The rules of DD8xx: where the time of a step goes, and what would save some of it."""
