"""Are the replicas one model: runs the user's model under DDP, and compares."""
