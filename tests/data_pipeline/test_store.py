"""Object stores, against a real S3 server on this machine: records from one and shards in one against the same in local
folders, streams and their cache against streams of a local folder, and faults of a store against what is reported."""

import functools
import http.server
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pytest
from mesatron_data.errors import DataError, StorageError
from mesatron_data.inspect import inspect
from mesatron_data.manifest import load_manifest
from mesatron_data.plan import Options
from mesatron_data.shards import prepare, tokenize_share
from mesatron_data.store import list_sizes
from mesatron_data.stream import TrainStream, ValidationSet, working_set
from mesatron_data.verify import VERIFIED_FILE, verify
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

CONTEXT_LENGTH = 16
SHARD_BYTES = 3000
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ORDER = {"seed": 7, "num_canonical_nodes": 3, "shuffle_block_size": 200}


class Gate(socketserver.ThreadingTCPServer):
    """Stands before a server and passes its answers on while it is open; with `spoil`, the next shard with a wrong
    byte."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int) -> None:
        self.behind = ("127.0.0.1", port)
        self.open = threading.Event()
        self.open.set()
        self.spoil = threading.Event()
        super().__init__(("127.0.0.1", 0), _Relay)


class _Relay(socketserver.BaseRequestHandler):
    server: Gate

    def handle(self) -> None:
        with socket.create_connection(self.server.behind) as behind:
            asking = threading.Thread(target=self.copy, args=(self.request, behind, False), daemon=True)
            asking.start()
            self.copy(behind, self.request, True)

    def copy(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if answers:
                    self.server.open.wait()
                if answers and ZSTD_MAGIC in data and self.server.spoil.is_set():
                    self.server.spoil.clear()
                    data = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other side has hung up


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    with Gate(port) as gate, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=gate.serve_forever, daemon=True).start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.server_address[1]}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        S3FileSystem.clear_instance_cache()  # of other tests, whose server has gone
        yield gate
        gate.shutdown()
    server.stop()


@pytest.fixture(scope="module")
def bucket(gate: Gate, records: Path) -> "Bucket":
    """A bucket with the records under text/."""
    bucket = Bucket()
    bucket.client.create_bucket(Bucket="data")
    for path in records.rglob("*.jsonl*"):
        bucket.put(f"text/{path.relative_to(records)}", path.read_bytes())
    return bucket


class Bucket:
    def __init__(self) -> None:
        self.client = boto3.client("s3")

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket="data", Key=key, Body=data)

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket="data", Key=key)["Body"].read()
        return content

    def files(self, prefix: str) -> dict[str, bytes]:
        found = self.client.list_objects_v2(Bucket="data", Prefix=f"{prefix}/").get("Contents", [])
        return {item["Key"].removeprefix(f"{prefix}/"): self.get(item["Key"]) for item in found}


def packed(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and folder / "unpacked" not in path.parents and path.name != VERIFIED_FILE
    }


@pytest.fixture(scope="module")
def stored(bucket: Bucket, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prepared folder in the bucket. Tests that change objects put them back."""
    for name, data in packed(prepared).items():
        bucket.put(f"shards/{name}", data)
    return "s3://data/shards"


def without_request(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files whose manifest names no input: a store's times are not those of a file system."""
    lines = files["manifest.json"].splitlines()
    names = b'"request"', b'"sha256"'
    return files | {"manifest.json": b"\n".join(line for line in lines if not line.strip().startswith(names))}


def test_records_from_a_store_and_shards_into_it(
    bucket: Bucket, prepared: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    options = Options(token_folder=tmp_path / "work")
    paths = ("s3://data/text", "s3://data/made", tokenizer_path, CONTEXT_LENGTH)
    for task in (1, 0):
        tokenize_share(*paths, task, 2, shard_bytes=SHARD_BYTES, options=options)
    result = prepare(*paths, shard_bytes=SHARD_BYTES, workers=2, merge_only=True, options=options)
    assert without_request(bucket.files("made")) == without_request(packed(prepared))
    assert load_manifest("s3://data/made") == result.manifest
    assert [path for path in tmp_path.rglob("*.tokens")], "token files stay where they are put"
    assert not list(tmp_path.rglob("*.mds*"))
    assert prepare(*paths, shard_bytes=SHARD_BYTES, options=options).reused
    with pytest.raises(DataError, match="was prepared from other input or settings"):
        prepare(*paths[:3], CONTEXT_LENGTH + 1, options=options)
    prepare(*paths[:3], CONTEXT_LENGTH + 1, overwrite=True, options=options)
    assert load_manifest("s3://data/made").context_length == CONTEXT_LENGTH + 1
    assert verify("s3://data/made/").samples == sum(
        split.samples for split in load_manifest("s3://data/made").splits.values()
    )


PREPARE = """
import sys
from pathlib import Path
from mesatron_data.plan import Options
from mesatron_data.shards import prepare
at, tokenizer, work = sys.argv[1:]
reports = 0
def progress(report):
    global reports
    reports += 1
    if str(reports) == at:
        print(report.step, flush=True)
        sys.stdin.read()
prepare("s3://data/text", "s3://data/killed", tokenizer, 16, shard_bytes=3000, progress=progress,
        options=Options(token_folder=Path(work)))
"""


def test_what_is_killed_on_its_way_into_a_store_is_gone_on_with(
    bucket: Bucket, prepared: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", PREPARE, "6", str(tokenizer_path), str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "pack\n"
        run.kill()
    stands = bucket.files("killed")
    assert len([name for name in stands if name.endswith(".zstd")]) == 2
    with pytest.raises(DataError, match=r"No manifest.json in s3://data/killed"):
        TrainStream("s3://data/killed", 4, cache_folder=tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("notes/*/*.json")}
    options = Options(token_folder=tmp_path)

    def unchanged(progress: object) -> None:
        assert {path: path.stat().st_mtime_ns for path in before} == before

    paths = ("s3://data/text", "s3://data/killed", tokenizer_path, CONTEXT_LENGTH)
    prepare(*paths, shard_bytes=SHARD_BYTES, progress=unchanged, options=options)
    assert without_request(bucket.files("killed")) == without_request(packed(prepared))


def test_what_is_something_else_in_a_store_is_left_alone(bucket: Bucket, tokenizer_path: Path, tmp_path: Path) -> None:
    bucket.put("thesis/chapter.txt", b"precious")
    options = Options(token_folder=tmp_path)
    with pytest.raises(DataError, match="s3://data/thesis exists and is not a prepared data folder"):
        prepare("s3://data/text", "s3://data/thesis", tokenizer_path, CONTEXT_LENGTH, overwrite=True, options=options)
    assert bucket.files("thesis") == {"chapter.txt": b"precious"}
    with pytest.raises(DataError, match=r"data\.token_folder"):
        prepare("s3://data/text", "s3://data/new", tokenizer_path, CONTEXT_LENGTH)
    with pytest.raises(DataError, match="there is no such bucket or folder; make it first"):
        prepare("s3://data/text", "s3://nowhere/new", tokenizer_path, CONTEXT_LENGTH, options=options)
    with pytest.raises(DataError, match="No folder s3://data/texts/train"):
        prepare("s3://data/texts", "s3://data/new", tokenizer_path, CONTEXT_LENGTH, options=options)


def ids(stream: TrainStream, steps: int) -> list[list[int]]:
    return [next(stream).sample_ids.tolist() for _ in range(steps)]


def test_a_store_is_read_like_a_folder(stored: str, prepared: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    local, remote = (TrainStream(str(prepared), 12, **ORDER), TrainStream(stored, 12, cache_folder=cache, **ORDER))
    for _ in range(local.steps_per_epoch + 2):
        one, other = next(local), next(remote)
        assert all(np.array_equal(value, getattr(other, name)) for name, value in vars(one).items())
    local.close()
    remote.close()
    assert [batch.sample_ids.tolist() for batch in ValidationSet(stored, 4, cache_folder=cache)] == [
        batch.sample_ids.tolist() for batch in ValidationSet(str(prepared), 4)
    ]
    assert verify(stored).samples == verify(prepared).samples
    assert inspect(stored) == inspect(prepared)


def held_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*/*/*"))


def test_a_limited_cache_keeps_to_its_limit_and_changes_nothing(stored: str, prepared: Path, tmp_path: Path) -> None:
    """Two streams in turn and one with readers of its own share a cache that holds less than half of the data."""
    cache = tmp_path / "cache"
    order = {"seed": 7, "num_canonical_nodes": 1, "shuffle_block_size": 20}
    with pytest.raises(DataError, match=r"cache_limit_bytes is 4000, but .* keeps \d+ bytes") as refused:
        TrainStream(stored, 4, cache_folder=cache, cache_limit_bytes=4000, workers=2, **order)
    limit = int(str(refused.value).partition("keeps ")[2].split()[0])
    plain = TrainStream(str(prepared), 4, **order)
    whole = int(plain._reader.bytes_per_shard.sum())
    assert limit < whole / 2
    expected = ids(plain, plain.steps_per_epoch * 2)
    plain.close()
    first = TrainStream(stored, 4, cache_folder=cache, cache_limit_bytes=limit, workers=2, **order)
    second = TrainStream(stored, 4, cache_folder=cache, cache_limit_bytes=limit, workers=0, **order)
    for step, batch in enumerate(expected):
        assert next(first).sample_ids.tolist() == batch
        assert held_bytes(cache) <= limit
        if step % 7 == 0:
            ids(second, 1)  # falls behind, so that its shards go and are fetched again
    first.close()
    second.close()
    assert first._reader.cache.fetched_bytes > 1.5 * sum(
        size for name, size in list_sizes(f"{stored}/train").items() if name.endswith(".zstd")
    ), "in two epochs shards were fetched again"


def test_the_working_set_is_that_of_the_order() -> None:
    samples, sizes = np.array([2, 2, 2]), np.array([10, 20, 40])
    assert working_set(np.array([0, 1, 2, 3, 4, 5]), samples, sizes) == 40
    assert working_set(np.array([0, 2, 1, 3, 4, 5]), samples, sizes) == 40
    assert working_set(np.array([0, 2, 4, 1, 3, 5]), samples, sizes) == 70
    assert working_set(np.array([4, 2, 3, 5, 0, 1]), samples, sizes) == 60


def test_a_damaged_object_is_fetched_again_and_then_named(stored: str, bucket: Bucket, tmp_path: Path) -> None:
    key = "shards/train/shard.00001.mds.zstd"
    good = bucket.get(key)
    bucket.put(key, good[:-20] + bytes(20))
    try:
        stream = TrainStream(stored, 4, cache_folder=tmp_path, workers=1)
        with pytest.raises(DataError, match=rf"Shard s3://data/{key} is damaged \(xxh64 [0-9a-f]+, expected [0-9a-f]+"):
            ids(stream, stream.steps_per_epoch)
        stream.close()
        with pytest.raises(DataError, match=rf"s3://data/{key} is damaged"):
            verify(stored)
        bucket.client.delete_object(Bucket="data", Key=key)
        stream = TrainStream(stored, 4, cache_folder=tmp_path, workers=1)
        with pytest.raises(DataError, match=r"Cannot read shard shard.00001.mds.zstd of s3://data/shards/train"):
            ids(stream, stream.steps_per_epoch)
        stream.close()
    finally:
        bucket.put(key, good)


def test_a_shard_that_is_damaged_on_its_way_is_fetched_again(prepared: Path, tmp_path: Path) -> None:
    """From a plain web server, whose client has no checksums of its own."""
    folder = functools.partial(QuietFiles, directory=str(prepared))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), folder) as server, Gate(server.server_address[1]) as gate:
        for one in (server, gate):
            threading.Thread(target=one.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{gate.server_address[1]}"
        stream = TrainStream(url, 4, cache_folder=tmp_path, workers=0, **ORDER)
        gate.spoil.set()
        plain = TrainStream(str(prepared), 4, workers=0, **ORDER)
        assert ids(stream, plain.steps_per_epoch) == ids(plain, plain.steps_per_epoch)
        assert not gate.spoil.is_set()
        stream.close()
        plain.close()
        gate.shutdown()
        server.shutdown()
    sizes = [path.stat().st_size for path in (prepared / "train").glob("*.zstd")]
    again = stream.figures()["fetched_bytes"] - sum(sizes)
    assert again in sizes, "one shard came twice"


class QuietFiles(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def test_a_slow_store_shows_in_the_figures_and_ends_in_a_time_out(stored: str, gate: Gate, tmp_path: Path) -> None:
    stream = TrainStream(stored, 4, cache_folder=tmp_path, workers=2, prefetch_batches=3, timeout_seconds=60, **ORDER)
    next(stream)
    reached = threading.Event()

    def filled() -> bool:
        return stream.figures()["batches_ready"] == 6 or reached.wait(0.01)

    while not filled():
        pass
    cold = TrainStream(stored, 4, cache_folder=tmp_path / "cold", workers=1, timeout_seconds=1, **ORDER)
    gate.open.clear()
    try:
        with pytest.raises(StorageError, match="Training batch 0 did not arrive within 1 s"):
            next(cold)
        assert cold.figures()["batches_ready"] == 0
        assert cold.figures()["fetched_bytes"] == 0
    finally:
        gate.open.set()
    cold.close()
    stream.close()
    assert stream.figures()["fetched_bytes"] > 0
    assert stream.figures()["fetch_seconds"] > 0


class Failing(http.server.BaseHTTPRequestHandler):
    """Answers each request with `status`, or hangs up where that is 0."""

    status: int

    def do_GET(self) -> None:
        if self.status:
            self.send_error(self.status)

    def log_message(self, *arguments: object) -> None:
        pass


def test_what_a_server_answers_tells_whether_another_start_is_worth_while() -> None:
    kinds = {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for Failing.status in (500, 503, 0, 403, 404):
            with pytest.raises(DataError) as caught:
                load_manifest(f"http://127.0.0.1:{server.server_address[1]}/shards")
            kinds[Failing.status] = type(caught.value)
        server.shutdown()
    assert kinds == {500: StorageError, 503: StorageError, 0: StorageError, 403: DataError, 404: DataError}


def test_an_unreachable_store_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        code = """if True:
            from mesatron_data.errors import DataError
            from mesatron_data.manifest import load_manifest
            for folder in ("s3://data/shards", "nosuchstore://data/shards"):
                try:
                    load_manifest(folder)
                except DataError as error:
                    print(error.exit_code, error)
        """
        environment = os.environ | {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{unused.getsockname()[1]}", "AWS_MAX_ATTEMPTS": "1",
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=120
        )
    first, second = done.stdout.splitlines()
    assert first.startswith("11 Cannot reach s3://data/shards/manifest.json (")
    assert first.endswith("; check the URL, credentials and network.")
    assert second.startswith("3 Cannot reach nosuchstore")
