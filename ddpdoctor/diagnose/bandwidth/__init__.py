"""The report of `allreduce-bench`: what a low figure may come from, and who stopped a bench that did not finish."""
