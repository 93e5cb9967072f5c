"""Small tasks that show what a mixer can do: MAD's six (arXiv 2403.17844) and multi-query associative recall (MQAR)."""
