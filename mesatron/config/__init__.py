"""One YAML file describes one run: `schema` names every key, `load` reads files, `checks` relates the fields."""

from mesatron.config.checks import accumulation_steps, check_prepared, data_parallel_size
from mesatron.config.load import changed_keys, dump_config, load_config
from mesatron.config.schema import Config, MesaConfig, ModelConfig

__all__ = [
    "Config",
    "MesaConfig",
    "ModelConfig",
    "accumulation_steps",
    "changed_keys",
    "check_prepared",
    "data_parallel_size",
    "dump_config",
    "load_config",
]
