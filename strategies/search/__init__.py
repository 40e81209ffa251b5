"""The search for the best plan: what may vary, lower bounds on every plan's step and memory, and the order in which to simulate."""
