"""JSONL conversations to token ids and loss masks."""
