"""Watches a running job and takes evidence."""
