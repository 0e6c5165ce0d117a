"""infinity inside other frameworks; nothing here is imported until a module of it is named."""
