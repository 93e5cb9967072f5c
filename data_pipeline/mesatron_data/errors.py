"""Faults of the data pipeline. A message is one sentence: what is wrong, where, and what to do."""


class DataError(Exception):
    """Input text, a tokenizer or prepared shards are missing, damaged or do not fit together."""

    exit_code = 3


class DiskFullError(DataError):
    """There is no space left to write shards or a tokenizer."""

    exit_code = 7


class StorageError(DataError):
    """A file system or an object store does not answer as it should; it may do so at another start."""

    exit_code = 11
