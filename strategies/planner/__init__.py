"""The search for the best plan: what may vary, and lower bounds on every plan's step and memory."""
