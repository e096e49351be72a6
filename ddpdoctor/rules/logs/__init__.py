"""Judges the logs, dumps and stacks of a job that ran without ddpdoctor."""
