"""Rules about what the nodes of a job saw of each other before it starts."""
