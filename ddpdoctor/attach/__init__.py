"""Looks at a job that already runs, from outside and without harm, and saves what was seen."""
