"""Preflight on a real cluster: the node that is unfit is named, and the run goes on without it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mesatron_data.errors import DataError
from slurm_training import Training

from mesatron.cluster import preflight
from mesatron.cluster.preflight import Findings, judge
from mesatron.cluster.words import FOLDER
from mesatron.config import load_config
from mesatron.errors import ConfigError, DiskFullError, StorageError, UnfitError

Make = Callable[..., Training]


@pytest.mark.long
def test_an_unfit_node_is_left_out(training: Make, untouched: Training) -> None:
    """n2 has no room in /dev/shm; the job is queued again at once and runs on the others."""
    cluster = untouched.cluster
    cluster.on("n2", "mount", "-o", "remount,size=1m", "/dev/shm")
    run = training("run", **{"launch.preflight_seconds": 60})
    try:
        run.submit()
        run.finish()
    finally:
        cluster.on("n2", "mount", "-o", "remount,size=1g", "/dev/shm")
    assert run.decisions() == [
        "node n2 is unfit: /dev/shm has 1 MiB free, fewer than 64",
        "requeue (a node is unfit) without n2",
    ]
    assert cluster.job(run.job)["NodeList"] == "n[1,3]"
    assert run.text().count("preflight  2 nodes are fit: 2 processes, all-reduce of 16 MiB at ") == 1
    run.check_equals(untouched)


@pytest.mark.long
def test_an_unfit_node_is_left_out_of_a_job_of_one(training: Make) -> None:
    run = training("run", **{"launch.preflight_seconds": 60})
    run.cluster.on("n1", "mount", "-o", "remount,size=1m", "/dev/shm")
    try:
        run.submit("--nodes=1")
        run.finish()
    finally:
        run.cluster.on("n1", "mount", "-o", "remount,size=1g", "/dev/shm")
    assert run.decisions() == [
        "node n1 is unfit: /dev/shm has 1 MiB free, fewer than 64",
        "requeue (a node is unfit) without n1",
    ]
    assert run.cluster.job(run.job)["NodeList"] == "n2"


@pytest.mark.long
def test_a_node_that_sees_another_folder(training: Make, untouched: Training) -> None:
    cluster = untouched.cluster
    run = training("run", **{"launch.preflight_seconds": 60})
    run.folder.mkdir(parents=True)
    cluster.on("n2", "mount", "-t", "tmpfs", "tmpfs", str(run.folder))
    try:
        run.submit()
        run.finish()
    finally:
        cluster.on("n2", "umount", str(run.folder))
    assert run.decisions()[0] == f"node n2 is unfit: {run.folder} there is not the folder of the first node"
    run.check_equals(untouched)


def node(name: str, *problems: str, **facts: str) -> Findings:
    return Findings(name, list(problems), facts)


def test_what_only_some_nodes_have_is_theirs() -> None:
    usual = {"torch": "2.13", "data": "a"}
    assert judge([node("n1", **usual), node("n2", **usual)]) == {}
    assert judge([node("n1", **usual), node("n2", "no disk", **usual)]) == {"n2": "no disk"}
    different = [node("n1", **usual), node("n1", **usual), node("n2", torch="2.12", data="a"), node("n3", **usual)]
    assert judge(different) == {"n2": "torch is 2.12, elsewhere 2.13"}
    lacking = [node("n1", **usual), node("n2", data="a"), node("n3", **usual)]
    assert judge(lacking) == {"n2": "torch is none, elsewhere 2.13"}


def test_what_all_nodes_have_is_no_nodes_fault() -> None:
    with pytest.raises(ConfigError, match="No node is fit for the run: on n1, no data"):
        judge([node("n1", "no data"), node("n2", "no data")])
    late = Findings("n2", ["no answer"], is_shared=True, kinds=[DataError, StorageError])
    with pytest.raises(StorageError, match="No node is fit for the run: on n2, no answer"):
        judge([late])
    # What is told is what the exit code means: failed storage first, for another start may help.
    full = Findings("n3", ["the disk is full"], kinds=[DiskFullError])
    with pytest.raises(DiskFullError, match="on n3, the disk is full"):
        judge([node("n1", "no data"), full])
    with pytest.raises(StorageError, match="on n2, no answer"):
        judge([node("n1", "no data"), full, late])


def test_a_node_that_is_alone_is_unfit_by_what_is_its_own(
    tmp_path: Path, tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here no /dev/shm and no disk is large enough."""
    config = load_config(tiny_config(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(preflight, "LEAST_SHARED_MEMORY", 1 << 60)
    with pytest.raises(UnfitError, match=r"^Node n1 is unfit: /dev/shm has"):
        preflight.run(config, 60)
    unfit = json.loads((tmp_path / "unfit.json").read_text())
    assert list(unfit) == ["n1"]
    assert unfit["n1"].startswith("/dev/shm has")
    monkeypatch.setattr(preflight, "CHECKPOINT_BYTES", 1 << 60)
    with pytest.raises(DiskFullError, match=r"^No node is fit for the run: on n1, /dev/shm .*; .*two checkpoints take"):
        preflight.run(config, 60)
