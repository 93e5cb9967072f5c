"""`mesatron compare`: several variants of one run, trained and measured alike."""
