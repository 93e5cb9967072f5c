"""Proof that a layout computes what one process computes: `layouts` lists them, `worlds` runs, `table` compares."""
