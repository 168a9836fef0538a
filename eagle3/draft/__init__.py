"""The drafter: one step, its training-time test, its objective, its files."""
