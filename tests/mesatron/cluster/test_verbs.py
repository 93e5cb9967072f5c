"""Options for sbatch as they are given on the command line."""

import pytest

from mesatron.cluster.verbs import sbatch_options
from mesatron.errors import ConfigError


def test_options_are_names_and_values() -> None:
    assert sbatch_options(None) == {}
    assert sbatch_options(["nodes=12", "export=A=1,B=2"]) == {"nodes": "12", "export": "A=1,B=2"}
    assert sbatch_options(["ntasks-per-node=1"]) == {"ntasks-per-node": "1"}


@pytest.mark.parametrize("option", ["nodes=0", "nodes=-1", "nodes=1-2", "nodes=00", "nodes=\u0663"])
def test_no_number_of_nodes(option: str) -> None:
    with pytest.raises(ConfigError, match=f"--sbatch {option} is no number of nodes; give 1 or more"):
        sbatch_options([option])


@pytest.mark.parametrize("option", ["=5", "nodes=", "nodes", "="])
def test_no_name_or_no_value(option: str) -> None:
    with pytest.raises(ConfigError, match="--sbatch takes NAME=VALUE"):
        sbatch_options([option])


@pytest.mark.parametrize("option", ["output=x.out", "signal=TERM@10", "array=0-3", "ntasks-per-node=2", "ntasks=8"])
def test_what_a_submission_decides_cannot_be_given(option: str) -> None:
    with pytest.raises(ConfigError, match=f"--sbatch {option} cannot be given: "):
        sbatch_options([option])
