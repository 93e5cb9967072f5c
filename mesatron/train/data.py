"""The prepared data of a run, checked against its config before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

from mesatron_data.manifest import Manifest, load_manifest
from mesatron_data.tokenizer import Tokenizer
from mesatron_data.verify import verify_once

from mesatron.config import Config, check_prepared
from mesatron.errors import DataError


def open_data(config: Config, alive: Callable[[], None]) -> Manifest:
    """The manifest of `data.folder`, after its shards were verified and compared with the config.

    `alive` is called after each shard that has to be read for that; those of an object store are verified as they are
    fetched. Raises DataError, naming both sides, when vocabulary,
    packed length or tokenizer differ or a shard is damaged.
    """
    folder = config.data.folder
    manifest = load_manifest(folder)
    check_prepared(config, manifest, folder)
    if config.tokenizer.path.exists() and Tokenizer.load(config.tokenizer.path).sha256 != manifest.tokenizer_sha256:
        raise DataError(
            f"{folder} was prepared with another tokenizer than {config.tokenizer.path}; prepare again with "
            "--overwrite."
        )
    verify_once(folder, alive)
    return manifest
