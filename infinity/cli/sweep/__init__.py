"""`infinity-bench sweep`: `command` asks, `run` keeps the order, `search` decides, the others measure and tell."""
