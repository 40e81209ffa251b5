"""What money and GPUs are good for: the largest model of a budget, one purchase against another."""
