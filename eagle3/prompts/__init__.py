"""Prompt files to token ids and loss masks."""
