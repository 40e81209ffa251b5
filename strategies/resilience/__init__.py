"""Runs over days: when and where a job saves, how it goes on after a failure, what it delivers."""
