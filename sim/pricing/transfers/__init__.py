"""What collectives and sends cost: algorithm and protocol, links, latency."""
