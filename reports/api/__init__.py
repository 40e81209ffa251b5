"""What commands do, as functions of the same names for Python: `shardyard.plan(job)` is `shardyard plan job.yaml`."""

PARTS = ("runs", "scaling", "clusters", "sensitivity", "published")
"""Parts of a report's page that can be left out."""
TRACES = {
    "perfetto": "one file for ui.perfetto.dev",
    "kineto": "a file of each rank, as PyTorch's profiler writes them, for HTA",
    "chakra": "execution traces of every rank, for ASTRA-sim",
}
"""Formats of traces, and what reads them."""
