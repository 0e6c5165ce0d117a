"""Where bytes rest: the run folder and its arena, and the layout of a model in it."""
