"""The console programs; a command imports what is heavy only once it runs."""
