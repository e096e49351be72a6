"""Some ranks' lines of a job's log, and cuts of it, never make an innocent rank guilty."""
