"""The target runs, features come out."""
