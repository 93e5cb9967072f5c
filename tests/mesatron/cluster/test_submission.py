"""Scripts for Slurm: what an array of runs shares, how many processes a job has, which job of a run is the newest."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mesatron.cluster.submission import Request, Submission, newest_job, plan, plan_array
from mesatron.config import load_config
from mesatron.errors import ConfigError


def test_an_array_gets_its_signal_as_early_as_any_run_needs_it(
    tmp_path: Path, tiny_config: Callable[..., Path]
) -> None:
    file = tiny_config(tmp_path)
    leads = {"short": 77, "long": 300, "middle": 200}
    configs = [load_config(file, [f"name={name}", f"launch.lead_seconds={lead}"]) for name, lead in leads.items()]
    plan = plan_array(configs, tmp_path / "out", "array", Request({"nodes": "1"}, {}))
    assert "#SBATCH --signal=B:USR1@300\n" in plan.files[plan.script]
    assert "#SBATCH --signal=B:USR1@77\n" in plan.files[tmp_path / "runs/short/launch/train.sbatch"]
    plan = plan_array([load_config(file)], tmp_path / "out", "array", Request({"nodes": "1", "time": "8"}, {}))
    assert "#SBATCH --signal=B:USR1@240\n" in plan.files[plan.script]


@pytest.mark.parametrize(("options", "processes"), [({}, 1), ({"gpus-per-node": "h100:4"}, 4), ({"gres": "gpu:0"}, 1)])
def test_a_process_for_each_gpu_or_one(
    options: dict[str, str], processes: int, tmp_path: Path, tiny_config: Callable[..., Path]
) -> None:
    config = load_config(tiny_config(tmp_path))
    assert Request({"nodes": "1"} | options, {}).processes_per_node(config) == processes


def test_values_that_sbatch_would_cut_short_are_quoted(tmp_path: Path, tiny_config: Callable[..., Path]) -> None:
    """A # there would silently drop every option that follows."""
    file = tiny_config(tmp_path / 'it\'s #1 "%j"')
    planned = plan(file, [], [], Request({"nodes": "1", "comment": "a \\ b"}, {}))
    lines = planned.files[planned.script].splitlines()
    assert f'#SBATCH --output="{tmp_path}/it\'s #1 \\"%%j\\"/runs/tiny/launch/slurm-%j.out"' in lines
    assert '#SBATCH --comment="a \\\\ b"' in lines
    assert "#SBATCH --job-name=tiny" in lines


def test_a_sweep_may_replace_what_does_not_fit(tmp_path: Path, tiny_config: Callable[..., Path]) -> None:
    file, request = tiny_config(tmp_path), Request({"nodes": "1"}, {})
    planned = plan(file, ["train.global_batch_size=3"], ["train.micro_batch_size=1,3"], request)
    assert planned.script == tmp_path / "runs/tiny-sweep/launch/train.sbatch"
    assert planned.run_folders == [tmp_path / f"runs/tiny-micro_batch_size-{size}" for size in (1, 3)]
    with pytest.raises(ConfigError, match="3 = 1 x 2 \\+ 1"):
        plan(file, ["train.global_batch_size=3"], ["train.micro_batch_size=1,2"], request)


@pytest.mark.parametrize("name", ["a:b", "a\\b"])
def test_folders_that_slurm_or_python_would_misread_are_refused(
    name: str, tmp_path: Path, tiny_config: Callable[..., Path]
) -> None:
    file, request = tiny_config(tmp_path), Request({"nodes": "1"}, {})
    with pytest.raises(ConfigError, match=r"has a [:\\] in its name, .*; choose another runs_folder"):
        plan(file, [f"runs_folder={tmp_path / name}"], [], request)
    with pytest.raises(ConfigError, match=r"--comment 'a\\nb' has a character that cannot be printed"):
        plan(file, [], [], replace(request, options={"nodes": "1", "comment": "a\nb"}))


def test_what_the_training_would_refuse_is_not_submitted(trained_run: Path) -> None:
    file, request = trained_run / "config.yaml", Request({"nodes": "1"}, {})
    changed = ["train.peak_lr=1e-4"]
    with pytest.raises(
        ConfigError, match=r"was started with other settings \(train.peak_lr: .* or pass --allow-changes"
    ):
        plan(file, changed, [], request)
    with pytest.raises(ConfigError, match="reads its data in an order that these settings would change"):
        plan(file, ["train.seed=5"], [], replace(request, allow_changes=True))
    planned = plan(file, changed, [], replace(request, allow_changes=True))
    assert "\nexport MESATRON_ALLOW_CHANGES=1\n" in planned.files[planned.script]
    planned = plan(file, ["checkpoint.keep_last=7"], [], request)
    assert "ALLOW_CHANGES" not in planned.files[planned.script]


def test_the_newest_job_is_the_last_in_time(tmp_path: Path) -> None:
    """Whatever the ids: a cluster that has lost its state counts anew. Earlier versions did not note the time."""
    launch = tmp_path / "launch"
    launch.mkdir()
    assert newest_job(tmp_path) is None
    submitted, started = launch / "submitted.json", launch / "job.json"
    submitted.write_text('{"job": "900"}')
    os.utime(submitted, (100, 100))
    assert newest_job(tmp_path) == Submission("900", 100, "", f"{launch}/slurm-900.out")
    started.write_text(json.dumps({"job": "12", "nodes": ["n1"], "processes": 1, "attempt": 2, "words": "words-12-0"}))
    os.utime(started, (200, 200))
    assert newest_job(tmp_path) == Submission("12", 200, "", f"{launch}/slurm-12.out")
    submitted.write_text(json.dumps({"job": "3", "time": 300.5, "command": "/a/train.sbatch", "output": "/a/3.out"}))
    assert newest_job(tmp_path) == Submission("3", 300.5, "/a/train.sbatch", "/a/3.out")


def test_an_earlier_version_noted_the_last_of_an_array_by_the_id_of_all(tmp_path: Path) -> None:
    launch = tmp_path / "launch"
    launch.mkdir()
    (launch / "submitted.json").write_text('{"job": "35_2", "time": 100, "command": "/a", "output": "/a/35_2.out"}')
    (launch / "job.json").write_text('{"job": "35", "time": 200, "command": "/a", "output": "/a/35_0.out"}')
    assert newest_job(tmp_path) == Submission("35_2", 100, "/a", "/a/35_2.out")
    (launch / "job.json").write_text('{"job": "40", "time": 200, "command": "/a", "output": "/a/40.out"}')
    assert newest_job(tmp_path) == Submission("40", 200, "/a", "/a/40.out")
    (launch / "submitted.json").write_text('{"job": "40", "time": 190, "command": "/a", "output": "/100%j/40.out"}')
    assert newest_job(tmp_path) == Submission("40", 190, "/a", "/100%j/40.out")
