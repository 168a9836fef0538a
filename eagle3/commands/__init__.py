"""The subcommands of `python -m eagle3`: what each takes. What does the work is imported once that is understood."""
