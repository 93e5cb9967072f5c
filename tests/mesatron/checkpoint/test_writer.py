"""Saved checkpoints against the tensors that went in, the safetensors library, and the faults of a save."""

import errno
import os
import resource
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from mesatron.checkpoint.reader import CheckpointReader
from mesatron.checkpoint.tensors import Fragment, TensorSpec, encode_header
from mesatron.checkpoint.verify import find_latest, list_checkpoints, verify
from mesatron.checkpoint.writer import CheckpointWriter
from mesatron.errors import CheckpointError, ConfigError, DiskFullError, StorageError, unusable_path


def writer_of(root, rank, world_size, tensors, step=5):
    specs = {"weights": [TensorSpec.of(name, value) for name, value in tensors.items()]}
    return CheckpointWriter(root, step, rank, world_size, "1", specs)


def save_alone(root, tensors, step=5):
    writer = writer_of(root, 0, 1, tensors, step)
    written = writer.write(Fragment.whole("weights", name, value) for name, value in tensors.items())
    return writer.commit({}, {}, [written], [writer.checksum()])


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
    path = save_alone(tmp_path, tensors)
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


@pytest.mark.parametrize(
    ("name", "dtype"), [("b", torch.float32), ("a", torch.float64)], ids=["another name", "another type"]
)
def test_what_is_not_in_the_specification_is_refused(tmp_path, name, dtype):
    writer = writer_of(tmp_path, 0, 1, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match=f"No place for weights tensor {name}"):
        writer.write([Fragment.whole("weights", name, torch.ones(2, dtype=dtype))])


@pytest.mark.parametrize(
    "specs",
    [
        [TensorSpec("a", (2,)), TensorSpec("a", (2,))],
        [TensorSpec("a", (3,), torch.uint8), TensorSpec("b", (1,))],
    ],
    ids=["repeated", "misaligned"],
)
def test_tensors_that_a_file_cannot_hold_are_refused(specs):
    with pytest.raises(ValueError, match="is repeated or misaligned"):
        encode_header(specs)


@pytest.mark.parametrize(
    ("of_first", "of_second", "message"),
    [
        ((0, 4), (5, 10), "9 of the 10 elements of tensor weights/a of step 5 were written"),
        ((0, 6), (5, 10), "11 of the 10 elements of tensor weights/a of step 5 were written"),
        ((0, 5), (0, 5), "does not give back what was written of tensor weights/a"),
    ],
    ids=["a hole", "an overlap", "a hole and an overlap"],
)
def test_elements_that_are_not_written_once_are_noticed(tmp_path, of_first, of_second, message):
    values = torch.randn(10)
    writers = [writer_of(tmp_path, rank, 2, {"a": values}) for rank in range(2)]
    written = [
        writer.write([Fragment("weights", "a", values[begin:end], [(begin, 0, end - begin)])])
        for writer, (begin, end) in zip(writers, (of_first, of_second), strict=True)
    ]
    with pytest.raises(CheckpointError, match=message):
        writers[0].commit({}, {}, written, [writer.checksum() for writer in writers])
    assert [info.status for info in list_checkpoints(tmp_path)] == ["incomplete"]


def test_bytes_that_get_lost_on_the_way_are_noticed(tmp_path):
    """As by a file system that lets one machine's page of a file go over another's."""
    values = torch.randn(1000)
    writer = writer_of(tmp_path, 0, 1, {"a": values})
    written = writer.write([Fragment.whole("weights", "a", values)])
    with (writer.folder / "weights-00000.safetensors").open("r+b") as file:
        file.seek(-512, os.SEEK_END)
        file.write(bytes(512))
    with pytest.raises(CheckpointError, match="does not give back what was written of tensor weights/a"):
        writer.commit({}, {}, [written], [writer.checksum()])


def test_a_refusing_fence_leaves_everything_as_it_was(tmp_path, save):
    """A newer attempt owns the run: neither a name nor `latest` nor the checkpoint in the way may change."""
    save(tmp_path, 4, "1")
    occupied = save(tmp_path, 5, "1")
    (occupied / "state.json").write_text("{}")

    class Fenced(Exception):
        pass

    def fence():
        raise Fenced

    values = torch.randn(3)
    writer = writer_of(tmp_path, 0, 1, {"a": values})
    written = writer.write([Fragment.whole("weights", "a", values)])
    (tmp_path / "latest").unlink()
    with pytest.raises(Fenced):
        writer.commit({}, {}, [written], [writer.checksum()], fence)
    assert {entry.name for entry in tmp_path.iterdir()} == {writer.folder.name, "step-00000004", "step-00000005"}


@pytest.mark.parametrize("length", [1, 10])
def test_parts_of_tensors_can_be_read(tmp_path, save, weights, length):
    reader = CheckpointReader(save(tmp_path, 3, "1", 3))
    for name, value in weights(3).items():
        flat = value.reshape(-1)
        into = torch.full((len(flat) + 2,), torch.nan)
        stretches = [(begin, begin + 2, min(length, len(flat) - begin)) for begin in range(0, len(flat), 2 * length)]
        reader.read("weights", name, stretches, into)
        expected = torch.full_like(into, torch.nan)
        for there, here, count in stretches:
            expected[here : here + count] = flat[there : there + count]
        assert torch.equal(into.nan_to_num(7), expected.nan_to_num(7))
    with pytest.raises(CheckpointError, match="Tensor head cannot be read from"):
        reader.read("weights", "head", [(10**6, 0, 1)], torch.zeros(1))
    with pytest.raises(CheckpointError, match="has no weights tensor nothing"):
        reader.read("weights", "nothing", [], torch.zeros(1))


def test_a_file_that_cannot_be_read_is_no_fault_of_the_checkpoint(tmp_path, save):
    """To read the beginning of a process's memory is an input/output error."""
    path = save(tmp_path, 3, "1")
    reader = CheckpointReader(path)
    for file in path.glob("weights-*"):
        file.unlink()
        file.symlink_to("/proc/self/mem")
    for read in (reader.tensor, partial(reader.read, stretches=[(0, 0, 1)], into=torch.zeros(1))):
        with pytest.raises(OSError, match=r"weights-0000\d\.safetensors") as caught:
            read("weights", "head")
        fault = unusable_path(caught.value)
        assert isinstance(fault, StorageError)
        assert str(fault).startswith(f"Cannot use {caught.value.filename}: Input/output error; start the same command")
    for number in (errno.ENOENT, errno.EACCES, errno.EROFS):
        assert isinstance(unusable_path(OSError(number, os.strerror(number), "x")), ConfigError)
    assert isinstance(unusable_path(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")), DiskFullError)


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
            save_alone(tmp_path, {f"w{i}": torch.ones(100) for i in range(9)}, step=2)
        except DiskFullError as error:
            message = str(error)
            sound = "weights-00000.safetensors (File too large)" in message and "\n" not in message
            os._exit(error.exit_code if sound else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    latest, skipped = find_latest(tmp_path)
    assert latest is not None
    assert latest.step == 1
    assert [info.status for info in skipped] == ["incomplete"]


def test_a_checkpoint_larger_than_the_disk_is_refused_before_anything_is_written(tmp_path):
    writer = CheckpointWriter(tmp_path, 1, 0, 1, "1", {"weights": [TensorSpec("huge", (10**15,))]})
    fragment = Fragment("weights", "huge", torch.ones(1), iter(lambda: pytest.fail("written"), None))
    with pytest.raises(DiskFullError, match=r"weights-00000.safetensors needs 4\d+\.\d MB and \d+\.\d MB are free"):
        writer.write([fragment])
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_large_file_is_brought_to_the_disk_bit_by_bit(tmp_path, monkeypatch):
    """Between two bits the writer can be interrupted, and is seen to get on."""
    monkeypatch.setattr("mesatron.checkpoint.writer._SYNC_BYTES", 3 << 22)
    tensors = {"a": torch.randn(5 << 20), "b": torch.randn(8 << 20)}
    specs = {"weights": [TensorSpec.of(name, value) for name, value in tensors.items()]}
    seen = []
    writer = CheckpointWriter(tmp_path, 5, 0, 1, "1", specs, lambda: seen.append("on"))
    for name in ("pwrite", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments, name=name, real=real: (seen.append(name), real(*arguments))[1])
    writer.write(Fragment.whole("weights", name, value) for name, value in tensors.items())
    blocks = ["on", "pwrite"] * 3
    assert seen == ["pwrite", *4 * [*blocks, "fsync"], *["on", "pwrite"], "fsync"]


def test_everything_is_on_the_disk_before_the_name_counts(tmp_path, save, monkeypatch):
    """A power cut keeps only what was synced: files and their folder before the rename, the rename at the end."""
    unsynced: set[str] = set()
    renamed: list[str] = []
    real = {name: getattr(os, name) for name in ("open", "write", "pwrite", "fsync", "rename")}

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

    def spy_pwrite(descriptor, data, offset):
        unsynced.add(path_of(descriptor))
        return real["pwrite"](descriptor, data, offset)

    def spy_fsync(descriptor):
        real["fsync"](descriptor)
        unsynced.discard(path_of(descriptor))

    def spy_rename(source, target):
        assert not unsynced
        renamed.append(os.path.basename(target))
        real["rename"](source, target)
        unsynced.add(os.path.dirname(target))

    spies = {"open": spy_open, "write": spy_write, "pwrite": spy_pwrite, "fsync": spy_fsync, "rename": spy_rename}
    for name, spy in spies.items():
        monkeypatch.setattr(os, name, spy)
    save(tmp_path, 3, "1")
    assert renamed == ["step-00000003"]
    assert not unsynced
