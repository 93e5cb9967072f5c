"""What a job learns from a run folder: attempts, requeues without progress, failed nodes, how long a stop takes."""

import json
from pathlib import Path

import pytest

from mesatron.cluster.history import History
from mesatron.cluster.submission import stop_lead_seconds
from mesatron.config import load_config
from mesatron.errors import ConfigError
from mesatron.monitor.attempts import Attempt

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"


def test_requeues_count_since_the_newest_checkpoint(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert history.requeues_without_progress() == 0
    history.decide("requeue (the training ended with 1)")
    history.decide("node n1 failed", failed_node="n1", failures=1)
    history.decide("requeue (the training ended with 1)")
    assert history.requeues_without_progress() == 2
    (tmp_path / "checkpoints/step-00000005").mkdir(parents=True)
    assert history.requeues_without_progress() == 0
    history.decide("requeue (the training ended with 1)")
    assert history.requeues_without_progress() == 1
    history.decide("node n1 failed", failed_node="n1", failures=1)
    history.decide("node n2 is unfit", failed_node="n2", failures=2)
    assert history.failed_nodes() == {"n1": 2, "n2": 2}


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "attempts.jsonl", None)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"event": "end", "att')
    history = History(tmp_path)
    assert history.is_running
    history.decide("requeue (the training ended with 1)")
    assert [record["what"] for record in history.records("decision")] == ["requeue (the training ended with 1)"]
    assert history.newest_attempt == attempt.number == 1
    assert history.end_code(1) is None
    second = Attempt(tmp_path / "attempts.jsonl", None)
    second.end("finished", 0)
    assert history.end_code(first_attempt=2) == 0
    assert not history.is_running


def test_the_lead_covers_measured_steps_and_saves(tmp_path: Path) -> None:
    config = load_config(QUICKSTART)
    assert stop_lead_seconds(config, tmp_path) == 300
    speeds = [config.tokens_per_step / seconds for seconds in (2.0, 10.0, 3.0)]
    lines = [json.dumps({"step": step, "train/tokens_per_second": speed}) for step, speed in enumerate(speeds)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "train/tok']))
    assert stop_lead_seconds(config, tmp_path) == 300
    saves = ((4, 0.0), (5, 90.0), (6, 40.0))
    lines += [json.dumps({"step": step, "time/checkpoint_seconds": seconds}) for step, seconds in saves]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert stop_lead_seconds(config, tmp_path) == pytest.approx(3 * (10 + 2 * 90), abs=1)
    assert stop_lead_seconds(load_config(QUICKSTART, ["launch.lead_seconds=77"]), tmp_path) == 77


@pytest.mark.parametrize(
    ("time", "lead"),
    [
        *[("8", 240), ("7:30", 225), ("0:08:00", 240), ("0-0:8", 240), ("0-0:08:10", 245), ("0-1", 300), ("1-0", 300)],
        *[("60", 300), ("0", 300), ("UNLIMITED", 300), ("1:2:3:4", 300), ("", 300)],
    ],
)
def test_the_lead_leaves_half_of_the_time_limit(time: str, lead: int, tmp_path: Path) -> None:
    """Else every start would be told to end at once; --time has the forms that sbatch documents."""
    assert stop_lead_seconds(load_config(QUICKSTART), tmp_path, time) == lead


def test_a_lead_as_long_as_the_time_limit_is_refused(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, ["launch.lead_seconds=480"])
    assert stop_lead_seconds(config, tmp_path, "9") == 480
    with pytest.raises(
        ConfigError, match="lead_seconds is 480, so a job with --time=8 would be told to end as it starts"
    ):
        stop_lead_seconds(config, tmp_path, "8")
