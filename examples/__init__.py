"""Runnable examples: the demo, its model, its prompts."""
