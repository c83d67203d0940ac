"""Only that it can be imported."""
