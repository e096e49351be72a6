"""Rules of `check-env`: facts of nodes in, answers out. Every module here is loaded by the registry."""
