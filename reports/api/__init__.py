"""What commands do, as functions of the same names for Python: `shardyard.plan(job)` is `shardyard plan job.yaml`."""
