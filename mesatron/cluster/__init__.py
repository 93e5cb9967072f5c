"""Runs on a cluster: where processes meet, what surrounds a training in a job, submitting, preflight. Free of torch."""
