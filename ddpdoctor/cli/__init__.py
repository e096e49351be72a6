"""The only place that knows Typer; one file a verb; thin."""
