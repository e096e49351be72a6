"""DD6xx: which rank blocks the job, and why."""
