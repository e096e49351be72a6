"""The command line, with one file per command. Only this package uses Typer."""
