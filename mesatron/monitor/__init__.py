"""What a run reports: TensorBoard files and metrics.jsonl, the log of attempts, the progress line."""
