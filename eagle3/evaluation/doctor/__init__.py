"""Why is acceptance low: a drafter's files, settings and work, looked at without stopping at the first fault."""
