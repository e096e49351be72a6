"""Runs collectors and rules, orders findings, picks the verdict."""
