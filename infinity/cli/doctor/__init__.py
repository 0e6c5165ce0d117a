"""`infinity-bench doctor`: `command` asks and prints, the checks judge and try."""
