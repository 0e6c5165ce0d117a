"""`infinity-bench sweep`: `command` reads options, `run` measures, `search` chooses settings, the others report."""
