"""A training in many layouts: `layouts` lists them, `worlds` runs them, `table` proves them equal, `speed` measures."""
