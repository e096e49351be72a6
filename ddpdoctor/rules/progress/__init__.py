"""DD6xx: which rank keeps a job from going on, and why."""
