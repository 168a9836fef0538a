"""The loop: batches, steps, validation, saves."""
