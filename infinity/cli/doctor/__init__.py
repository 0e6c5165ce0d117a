"""`infinity-bench doctor`: `command` runs the checks and prints what they find."""
