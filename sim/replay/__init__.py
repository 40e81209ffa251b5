"""Times of ops that wait for each other, worked out anew by numpy for other durations."""
