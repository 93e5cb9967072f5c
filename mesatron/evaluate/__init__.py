"""Measuring a model on held-out text."""
