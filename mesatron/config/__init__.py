"""One YAML file describes one run: `schema` and `mixers` name every key, `load` reads, `checks` relates the fields."""

from mesatron.config.checks import accumulation_steps, check_prepared, data_parallel_size
from mesatron.config.load import as_override, changed_keys, dump_config, load_config, load_stored_config
from mesatron.config.mixers import AttentionConfig, MesaConfig, MesaRLSConfig
from mesatron.config.schema import Config, ModelConfig

__all__ = [
    "AttentionConfig",
    "Config",
    "MesaConfig",
    "MesaRLSConfig",
    "ModelConfig",
    "accumulation_steps",
    "as_override",
    "changed_keys",
    "check_prepared",
    "data_parallel_size",
    "dump_config",
    "load_config",
    "load_stored_config",
]
