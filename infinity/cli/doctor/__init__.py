"""Floor 17. `infinity-bench doctor`: `command` asks and prints, `checks` judge and try."""
