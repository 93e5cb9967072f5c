"""Saved checkpoints against the tensors that went in, the safetensors library, and the faults of a save."""

import os
import resource

import pytest
import torch
from safetensors.torch import load_file

from mesatron.checkpoint.reader import CheckpointReader
from mesatron.checkpoint.tensors import TensorSpec
from mesatron.checkpoint.verify import find_latest, list_checkpoints, verify
from mesatron.checkpoint.writer import CheckpointWriter
from mesatron.errors import CheckpointError, DiskFullError, PeerLostError


def write_one(root, rank, world_size, tensors, step=5, kind="weights"):
    writer = CheckpointWriter(root, step, rank, world_size, "1")
    writer.write_tensors(kind, [TensorSpec.of(name, value) for name, value in tensors.items()], tensors.items())
    writer.finish()
    return writer


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_every_tensor_comes_back_whatever_the_number_of_ranks(tmp_path, save, weights, world_size):
    path = save(tmp_path, 40, "1", world_size)
    verify(path)
    reader = CheckpointReader(path)
    expected = weights(40)
    assert (reader.step, reader.ranks, set(reader.names("weights"))) == (40, world_size, set(expected))
    from_library: dict[str, torch.Tensor] = {}
    for file in path.glob("weights-*.safetensors"):
        from_library |= load_file(file)
    for name, value in expected.items():
        assert reader.shape("weights", name) == value.shape
        assert torch.equal(reader.tensor("weights", name), value)
        assert torch.equal(from_library[name], value)
    for rank in range(world_size):
        states = reader.rng(rank)
        assert states["python"].tolist() == [rank, -40]
        assert states["torch"].tolist() == list(range(rank, rank + 16))
    assert reader.rng(world_size) == {}
    assert reader.text("config.yaml") == "seed: 1\n"


def test_every_type_and_memory_layout_comes_back_bit_for_bit(tmp_path):
    nan_with_payload = torch.tensor([0x7FC12345, 0x3F800000], dtype=torch.int32).view(torch.float32)
    tensors = {
        "double": torch.tensor(1 / 3, dtype=torch.float64),
        "long": torch.arange(3),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "sliced": torch.arange(10.0)[1::3],
        "nan": nan_with_payload,
        "negative zero": torch.tensor([-0.0]),
        "brain": torch.randn(3, dtype=torch.bfloat16),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
    }
    path = write_one(tmp_path, 0, 1, tensors).commit({}, {}, {"weights": tensors})
    verify(path)
    reader = CheckpointReader(path)
    for name, value in tensors.items():
        found = reader.tensor("weights", name)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.dtype.itemsize]
        assert torch.equal(found.view(bits), value.view(bits))


def test_a_tensor_read_can_be_changed_without_touching_the_checkpoint(tmp_path, save):
    path = save(tmp_path, 1, "1")
    CheckpointReader(path).tensor("weights", "embedding").zero_()
    verify(path)


def test_a_gather_is_run_to_its_end_although_the_rank_owns_only_its_beginning(tmp_path):
    gathered = []

    def gather():
        for name in "abcde":
            gathered.append(name)
            if name == "b":
                yield name, torch.ones(2)

    CheckpointWriter(tmp_path, 1, 0, 1, "1").write_tensors("weights", [TensorSpec("b", (2,))], gather())
    assert gathered == list("abcde")


@pytest.mark.parametrize(
    ("specs", "tensors"),
    [
        ([TensorSpec("a", (2,))], [("a", torch.ones(3))]),
        ([TensorSpec("a", (2,))], [("a", torch.ones(2, dtype=torch.float64))]),
        ([TensorSpec("a", (2,))], [("b", torch.ones(2))]),
        ([TensorSpec("a", (2,))], []),
        ([], [("a", torch.ones(2))]),
        ([TensorSpec("a", (2,)), TensorSpec("a", (2,))], [("a", torch.ones(2)), ("a", torch.ones(2))]),
        (
            [TensorSpec("a", (3,), torch.uint8), TensorSpec("b", (1,))],
            [("a", torch.ones(3, dtype=torch.uint8)), ("b", torch.ones(1))],
        ),
    ],
    ids=["shape", "type", "name", "too few", "too many", "repeated", "misaligned"],
)
def test_tensors_that_differ_from_their_specification_are_refused(tmp_path, specs, tensors):
    with pytest.raises(ValueError):
        CheckpointWriter(tmp_path, 1, 0, 1, "1").write_tensors("weights", specs, tensors)


def test_a_tensor_that_no_rank_or_two_ranks_wrote_is_named(tmp_path):
    write_one(tmp_path, 1, 2, {"b": torch.ones(2)})
    with pytest.raises(CheckpointError, match="No rank wrote the weights tensor c of step 5"):
        write_one(tmp_path, 0, 2, {"a": torch.ones(2)}).commit({}, {}, {"weights": ["a", "b", "c"]})
    with pytest.raises(CheckpointError, match="Two ranks wrote the weights tensor b of step 5"):
        write_one(tmp_path, 0, 2, {"b": torch.ones(2)}).commit({}, {}, {"weights": ["b"]})
    assert [info.status for info in list_checkpoints(tmp_path)] == ["incomplete"]


def test_a_verifying_checkpoint_is_never_replaced(tmp_path, save):
    path = save(tmp_path, 7, "1")
    before = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.iterdir()}
    save(tmp_path, 7, "2", world_size=1)
    assert {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.iterdir()} == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000007", "latest"}


def test_a_damaged_checkpoint_of_the_same_step_is_set_aside_not_deleted(tmp_path, save):
    for attempt in ("1", "2", "2"):
        path = save(tmp_path, 7, attempt)
        (path / "state.json").write_text("{}")
    save(tmp_path, 7, "2")
    infos = list_checkpoints(tmp_path, deep=True)
    assert [info.status for info in infos].count("complete") == 1
    aside = [info.path for info in infos if info.status == "damaged"]
    assert sorted(path.name for path in aside) == [
        "damaged-step-00000007-2",
        "damaged-step-00000007-2-2",
        "damaged-step-00000007-2-3",
    ]
    assert all((path / "state.json").read_text() == "{}" for path in aside)


def test_a_full_disk_ends_in_one_line_and_leaves_the_previous_checkpoint(tmp_path, save):
    """The kernel refuses to let a file grow past a limit, which every write meets as it would meet a full disk."""
    save(tmp_path, 1, "1")
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
            write_one(tmp_path, 0, 1, {f"w{i}": torch.ones(100) for i in range(9)}, step=2)
        except DiskFullError as error:
            message = str(error)
            sound = "weights-00000.safetensors of 0.0 MB" in message and "\n" not in message
            os._exit(error.exit_code if sound else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000001", "latest"}
    latest, skipped = find_latest(tmp_path)
    assert latest is not None
    assert (latest.step, skipped) == (1, [])


def test_a_checkpoint_larger_than_the_disk_is_refused_before_anything_is_gathered(tmp_path):
    writer = CheckpointWriter(tmp_path, 1, 0, 1, "1")
    with pytest.raises(DiskFullError, match=r"weights-00000.safetensors needs 4\d+\.\d MB and \d+\.\d MB are free"):
        writer.write_tensors("weights", [TensorSpec("huge", (10**15,))], iter(lambda: pytest.fail("gathered"), None))
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_folder_another_rank_removed_says_so(tmp_path):
    writer = CheckpointWriter(tmp_path, 1, 1, 2, "1")
    writer.folder.rmdir()
    with pytest.raises(PeerLostError, match="vanished while rank 1 saved step 1"):
        writer.finish()


def test_everything_is_on_the_disk_before_the_name_counts(tmp_path, save, monkeypatch):
    """A power cut keeps only what was synced: files and their folder before the rename, the rename at the end."""
    unsynced: set[str] = set()
    renamed: list[str] = []
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename")}

    def path_of(descriptor):
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def spy_open(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            unsynced.add(os.path.dirname(path))
            if str(path).endswith("manifest.json"):
                assert unsynced == {os.path.dirname(path)}, "the manifest comes last"
        return real["open"](path, flags, *args, **kwargs)

    def spy_write(descriptor, data):
        unsynced.add(path_of(descriptor))
        return real["write"](descriptor, data)

    def spy_fsync(descriptor):
        real["fsync"](descriptor)
        unsynced.discard(path_of(descriptor))

    def spy_rename(source, target):
        assert not unsynced
        renamed.append(os.path.basename(target))
        real["rename"](source, target)
        unsynced.add(os.path.dirname(target))

    for name, spy in {"open": spy_open, "write": spy_write, "fsync": spy_fsync, "rename": spy_rename}.items():
        monkeypatch.setattr(os, name, spy)
    save(tmp_path, 3, "1")
    assert renamed == ["step-00000003"]
    assert not unsynced
