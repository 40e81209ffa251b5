"""Documents that people and other programs write, read under limits, and what is said of mistakes in them."""
