"""Perplexity of a trained checkpoint against a plain sum over the stored sequences, overall and by source, and against
what training itself logged."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from mesatron_data.batch import IGNORED_TARGET, Batch
from mesatron_data.errors import DataError
from mesatron_data.manifest import Manifest, load_manifest
from mesatron_data.stream import ValidationSet
from safetensors import safe_open
from torch.nn import functional as F

from mesatron.errors import CheckpointError, ConfigError
from mesatron.evaluate.checkpoint import TrainedModel, evaluate_perplexity, load_model
from mesatron.evaluate.perplexity import Perplexity, measure
from mesatron.parallel.distributed import World
from mesatron.parallel.layout import Group, Layout


@pytest.fixture(scope="module")
def trained(trained_run: Path) -> TrainedModel:
    return load_model(trained_run)


@pytest.fixture(scope="module")
def measured(trained: TrainedModel) -> Perplexity:
    return evaluate_perplexity(trained)


def test_the_weights_are_the_newest_checkpoint_s(trained: TrainedModel, trained_run: Path) -> None:
    assert trained.checkpoint.folder == trained_run / "checkpoints/step-00000006"
    with safe_open(trained.checkpoint.folder / "weights-00000.safetensors", framework="pt") as file:
        parameters = dict(trained.model.named_parameters())
        assert set(file.keys()) == set(parameters)
        assert all(torch.equal(parameters[name].cpu(), file.get_tensor(name)) for name in parameters)
    assert not trained.model.training


def test_losses_by_source_and_position_are_plain_means(trained: TrainedModel, measured: Perplexity) -> None:
    """One by one, from the logits."""
    folder = trained.config.data.folder
    sources = load_manifest(str(folder)).sources
    by_source: dict[str, list[float]] = {}
    by_position: list[list[float]] = [[] for _ in range(trained.config.data.context_length)]
    validation = ValidationSet(str(folder), 64)
    for batch in validation:
        with torch.no_grad():
            x = trained.model.embedding(batch.tokens.to(trained.device))
            for block in trained.model.blocks:
                x, _ = block(x)
            log_probabilities = F.log_softmax(trained.model.embedding(trained.model.norm(x)).cpu().double(), -1)
        for row in range(len(batch.tokens)):
            for position, target in enumerate(batch.targets[row].tolist()):
                if target != IGNORED_TARGET:
                    source = sources[int(batch.sources[row, position])]
                    loss = -log_probabilities[row, position, target].item()
                    by_source.setdefault(source, []).append(loss)
                    by_position[position].append(loss)
    assert measured.tokens_by_source == {source: len(losses) for source, losses in by_source.items()}
    for source, losses in by_source.items():
        assert measured.loss_by_source[source] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)
    assert measured.tokens_by_position == [len(losses) for losses in by_position]
    assert measured.loss_by_position == pytest.approx([math.fsum(x) / len(x) for x in by_position], rel=1e-6)
    every = [loss for losses in by_source.values() for loss in losses]
    assert measured.tokens == len(every)
    assert measured.loss == pytest.approx(math.fsum(every) / len(every), rel=1e-6)
    assert measured.perplexity == math.exp(measured.loss)


def test_training_logged_the_same(trained: TrainedModel, trained_run: Path) -> None:
    """On the 16 sequences that training looked at."""
    last = json.loads((trained_run / "metrics.jsonl").read_text().splitlines()[-1])
    folder = trained.config.data.folder
    validation = ValidationSet(str(folder), 16, max_samples=16)
    batch = next(iter(validation))
    with torch.no_grad():
        losses = trained.model(batch.tokens.to(trained.device), batch.targets.to(trained.device)).cpu()
    assert last["validation/loss"] == pytest.approx((losses.sum() / (batch.targets != IGNORED_TARGET).sum()).item())


def test_solver_settings_can_be_replaced(trained_run: Path, trained: TrainedModel) -> None:
    coarse = load_model(trained_run, {"solver_steps": 1, "solver_tolerance": 0.0})
    mesa = coarse.config.model.mesa
    assert (mesa.solver_steps, mesa.solver_tolerance) == (1, 0.0)
    tokens = torch.arange(60, device=trained.device)[None]
    with torch.no_grad():
        change = coarse.model(tokens, tokens) - trained.model(tokens, tokens)
    assert (coarse.model.blocks[0].mixer.observations["solver/steps"] == 1).all()
    assert 1e-6 < change.abs().max() < 1


@pytest.mark.parametrize("pieces", [1, 2])
def test_positions_are_those_of_whole_sequences(pieces: int) -> None:
    """Also where sequences are shared by processes; a position that no sequence scores has no loss."""
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    targets = torch.tensor([[2, IGNORED_TARGET, 4, IGNORED_TARGET], [6, 7, 8, IGNORED_TARGET]])
    batch = Batch(tokens, targets, torch.tensor([0, 4, 8]), torch.zeros_like(tokens), torch.arange(2))
    manifest = Manifest("", 9, 1, 4, "uint16", ["a"], {}, "")
    world = World(0, 1, torch.device("cpu"))
    measured = [
        measure(lambda x, *_: x.float(), iter([batch]), manifest, Layout(world, context=Group(rank, pieces)))
        for rank in range(pieces)
    ]
    counts = [sum(one.tokens_by_position[k] for one in measured) for k in range(4)]
    assert counts == [2, 1, 2, 0]
    losses = [[one.loss_by_position[k] for one in measured if one.tokens_by_position[k]] for k in range(4)]
    assert losses == [[3.0], [6.0], [5.0], []]
    assert all(one.loss_by_position[3] is None for one in measured)


def test_an_overflowing_perplexity_is_infinite() -> None:
    assert Perplexity(loss=800.0, tokens=1).perplexity == math.inf


def test_data_of_another_shape_is_refused(trained: TrainedModel, tmp_path: Path) -> None:
    config = trained.config
    other = config.model_copy(update={"data": config.data.model_copy(update={"context_length": 32})})
    with pytest.raises(DataError, match=r"data.context_length is 32, but .* was prepared with 64"):
        evaluate_perplexity(TrainedModel(trained.model, other, trained.checkpoint, trained.device))
    with pytest.raises(DataError, match=r"No manifest\.json"):
        evaluate_perplexity(trained, tmp_path)


def test_a_folder_that_was_prepared_anew_is_refused_unless_named(
    trained: TrainedModel, measured: Perplexity, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained.checkpoint.state
    assert measured.data_fingerprint == state["data"]["fingerprint"]
    monkeypatch.setitem(state, "data", state["data"] | {"fingerprint": "another"})
    folder = trained.config.data.folder
    with pytest.raises(DataError, match=r"holds other data now than .* was trained on; to measure .* give --data"):
        evaluate_perplexity(trained)
    assert evaluate_perplexity(trained, folder) == measured


def test_checkpoints_that_cannot_be_loaded(trained_run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_model(tmp_path)
    checkpoint = shutil.copytree(trained_run / "checkpoints/step-00000006", tmp_path / "step-00000006")
    with (checkpoint / "config.yaml").open("a") as file:
        file.write("colour: blue\n")
    with pytest.raises(ConfigError, match="unknown key 'colour'"):
        load_model(checkpoint)
    weights = checkpoint / "weights-00000.safetensors"
    (checkpoint / "config.yaml").write_text((trained_run / "config.yaml").read_text())
    content = bytearray(weights.read_bytes())
    content[-10] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged: tensor .* has changed"):
        load_model(checkpoint)
