"""The console programs. Heavy modules are imported only when a command runs."""
