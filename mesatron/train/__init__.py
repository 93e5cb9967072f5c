"""Training: `loop` reads top to bottom; the other modules are the nouns it uses."""
