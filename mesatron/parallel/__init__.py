"""Everything that knows of more than one process."""
