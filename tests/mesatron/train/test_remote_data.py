"""Training by two processes from an object store, killed twice and stopped once, against one run from a local folder:
every loss, sequence, weight and moment; then the trained model's perplexity from both."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from mesatron.evaluate.checkpoint import evaluate_perplexity, load_model
from mesatron.parallel.distributed import PeerLostError

SABOTAGE = Path(__file__).with_name("sabotage.py")


@pytest.fixture
def store(short_data: Path) -> Iterator[dict[str, str]]:
    """An S3 server that holds short_data's shards in s3://data/shards, and the variables it takes to reach it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    variables = {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()  # of other tests, whose server has gone
        client = boto3.client("s3")
        client.create_bucket(Bucket="data")
        for path in short_data.rglob("*"):
            if path.is_file() and short_data / "unpacked" not in path.parents:
                client.upload_file(str(path), "data", f"shards/{path.relative_to(short_data)}")
        yield variables
    server.stop()


def test_a_run_from_a_store_equals_one_from_a_folder(
    store: dict[str, str], tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, world: Callable,
    run_of: Callable,
) -> None:  # fmt: skip
    settings = {"train.steps": 12, "checkpoint.every_steps": 3, "train.global_batch_size": 8, "data.workers": 2}
    whole = odd_config(tmp_path / "whole", short_data, **settings)
    assert train(2, whole).exit_code == 0
    settings |= {
        "data.folder": "s3://data/shards", "data.cache_folder": str(tmp_path / "cache"),
        "data.cache_limit_bytes": 60_000,
    }  # fmt: skip
    config = odd_config(tmp_path / "remote", short_data, **settings)
    for cut in ("kill=2", "kill=7"):
        outcome = world(2, SABOTAGE, cut, "train", config, environment=store)
        assert set(outcome.exit_codes) <= {-signal.SIGKILL, PeerLostError.exit_code}
    assert train(2, config, "--stop-at-step=10", environment=store).exit_code == 75
    finished = train(2, config, environment=store)
    assert finished.exit_code == 0, finished.errors
    run, expected = run_of(config), run_of(whole)
    for tag in ("train/loss", "data/samples_checksum"):
        assert run.curve(tag) == expected.curve(tag)
    assert run.checksums(12) == expected.checksums(12)
    assert all(0 <= value <= 4 for value in run.curve("storage/batches_ready"))
    assert list((tmp_path / "cache").rglob("*.mds")), "unpacked shards lie in the cache folder"
    trained = load_model(run.path)
    assert evaluate_perplexity(trained) == evaluate_perplexity(trained, str(short_data))


def test_a_cache_that_is_too_small_is_refused_with_the_number(
    store: dict[str, str], tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable
) -> None:
    settings = {
        "data.folder": "s3://data/shards", "data.cache_folder": str(tmp_path / "cache"),
        "data.cache_limit_bytes": 100,
    }  # fmt: skip
    outcome = train(2, odd_config(tmp_path, short_data, **settings), environment=store)
    assert outcome.exit_code == 3
    (line,) = outcome.error_lines
    assert line.startswith("mesatron: data.cache_limit_bytes is 100, but this order of the data keeps ")
