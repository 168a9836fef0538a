"""The subcommands of `python -m eagle3`, which import what takes seconds once their arguments are understood."""
