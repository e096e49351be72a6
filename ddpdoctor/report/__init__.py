"""Turns reports into text, with one file per format."""
