"""Relations between fields: each violated one against the arithmetic its message must show, accumulation against the
product it stands for, prepared data against the config."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesatron_data.manifest import load_manifest

from mesatron.config import accumulation_steps, check_prepared, data_parallel_size, load_config
from mesatron.errors import ConfigError, DataError

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"


@pytest.mark.parametrize(
    ("overrides", "arithmetic"),
    [
        (["model.heads=3"], "3 x 64 = 192, not 128"),
        (["train.micro_batch_size=3"], "16 = 5 x 3 + 1"),
        (["train.micro_batch_size=17"], "16 = 0 x 17 + 16"),
        (
            ["train.spike_sigma=6", "checkpoint.keep_last=1"],
            "(1) must exceed the checkpoints that a spike spoils, but of train.spike_steps + 1 = 4 steps up to 1",
        ),
        (
            ["train.spike_sigma=6", "checkpoint.keep_last=2", "checkpoint.every_steps=3"],
            "up to 2 are saved with checkpoint.every_steps = 3",
        ),
        (["checkpoint.local_every_steps=5"], "checkpoint.local_folder (None) and checkpoint.local_every_steps (5)"),
        (["checkpoint.local_folder=x"], "checkpoint.local_folder (x) and checkpoint.local_every_steps (0) must be set"),
        (["train.steps=30"], "train.warmup_steps (30) must be fewer than train.steps (30)"),
        (["monitor.log_every_steps=20"], "50 is none of 20"),
        (
            ["checkpoint.every_steps=30", "checkpoint.keep_every_steps=100"],
            "checkpoint.keep_every_steps must be a multiple of checkpoint.every_steps, but 100 is none of 30",
        ),
        (["train.schedule=wsd", "train.steps=40", "train.decay_fraction=0.3"], "30 + 0.3 x 40 = 42 of 40"),
        (["train.start_lr=5e-3"], "train.start_lr (0.005) must not exceed train.peak_lr (0.004)"),
        (["model.mesa.lambda_initial=0.25"], "lambda_initial (0.25) must exceed model.mesa.lambda_lower_bound (0.25)"),
        (
            ["model.mixer=[mesa,gla,hawk_mesa,swa-2]"],
            "but mesa + gla + hawk + mesa + swa-2 = 5 mixers do not fit into 4",
        ),
        (["model.mlp_ratio=0.003"], "0.003 x 128 rounds to 0"),
        (["parallel.tensor_size=4"], "model.heads must be a multiple of parallel.tensor_size, but 2 = 0 x 4 + 2"),
        (["parallel.tensor_size=2", "model.mlp_ratio=1.0078125"], "129 = 64 x 2 + 1"),
        (["parallel.sequence_parallel=true"], "parallel.sequence_parallel needs parallel.tensor_size above 1"),
        (["train.cuda_graphs=true", "parallel.zero_stage=3"], "needs parallel.zero_stage 1 or 2, not 3; change it or"),
        (
            ["train.cuda_graphs=true", "train.activation_checkpointing=full"],
            "none or selective, not full; change it or",
        ),
        (
            ["train.cuda_graphs=true", "data.reset_state_at_documents=true"],
            "at_documents false, not true",
        ),
        (["parallel.context_size=3"], "parallel.context_size, but 256 = 85 x 3 + 1"),
        (
            [
                "data.context_length=6",
                "parallel.context_size=2",
                "parallel.tensor_size=2",
                "parallel.sequence_parallel=true",
            ],
            "parallel.context_size x parallel.tensor_size, but 6 = 1 x 4 + 2",
        ),
        (["data.context_length=8", "parallel.context_size=4"], "8 / 4 = 2 tokens are fewer than the 3 that"),
        (["parallel.pipeline_size=5"], "5 stages would share 4 blocks"),
        *(
            (["parallel.pipeline_size=2", f"parallel.zero_stage={stage}"], "needs parallel.zero_stage 1")
            for stage in (0, 2, 3)
        ),
        (["parallel.offload_optimizer=true", "parallel.zero_stage=0"], "pipeline_size 1, not 0 and 1"),
        (["data.folder=s3://bucket/shards"], "s3://bucket/shards is a URL; name a folder on each machine"),
        (["data.cache_limit_bytes=1000"], "cache_limit_bytes is 1000, but there is no data.cache_folder"),
        (
            ["data.min_document_tokens=9", "data.max_document_tokens=8"],
            "data.max_document_tokens (8) must not be less than data.min_document_tokens (9)",
        ),
        (["data.folder=data_pipeline/sample"], "data.folder and data.input_folder are both data_pipeline/sample"),
    ],
)
def test_fields_that_do_not_fit_together(overrides: list[str], arithmetic: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides)
    assert arithmetic in str(caught.value)
    assert str(QUICKSTART) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.steps=31"],
        ["train.schedule=wsd", "train.steps=40", "train.decay_fraction=0.2"],
        ["train.start_lr=4e-3"],
        ["train.spike_sigma=6", "checkpoint.keep_last=2"],
        ["train.spike_sigma=6", "checkpoint.keep_last=3", "checkpoint.every_steps=3"],
        ["train.spike_sigma=6", "checkpoint.keep_last=1", "train.max_rewinds=0"],
        ["checkpoint.keep_last=1"],
        ["checkpoint.every_steps=30", "checkpoint.keep_every_steps=90"],
        ["model.mesa.lambda_lower_bound=0"],
        ["model.mlp_ratio=0.004"],
        ["model.mixer=[gla,hawk_mesa,swa-2]"],
        ["data.folder=s3://bucket/shards", "data.cache_folder=cache", "data.cache_limit_bytes=1000"],
        ["data.weights={RedPajamaBook: 1, RedPajamaC4: 0.5}", "data.min_document_tokens=9"],
    ],
)
def test_fields_that_just_fit(overrides: list[str]) -> None:
    load_config(QUICKSTART, overrides)


QUICKSTART_CONFIG = load_config(QUICKSTART)


@given(
    micro=st.integers(1, 64), processes=st.integers(1, 64), accumulation=st.integers(1, 64), extra=st.integers(0, 63)
)
def test_accumulation_is_the_missing_factor_or_an_error(
    micro: int, processes: int, accumulation: int, extra: int
) -> None:
    batch = micro * processes * accumulation + extra
    train = QUICKSTART_CONFIG.train.model_copy(update={"global_batch_size": batch, "micro_batch_size": micro})
    config = QUICKSTART_CONFIG.model_copy(update={"train": train})
    if extra % (micro * processes):
        with pytest.raises(ConfigError, match=f"{batch} is no multiple of {micro} x {processes} = {micro * processes}"):
            accumulation_steps(config, processes)
    else:
        assert accumulation_steps(config, processes) * micro * processes == batch


def test_prepared_data_must_fit(tiny_data: Path, tiny_config, tmp_path: Path) -> None:
    manifest = load_manifest(str(tiny_data / "shards"))
    config = load_config(tiny_config(tmp_path))
    check_prepared(config, manifest, tiny_data / "shards")
    for override, numbers in {
        "data.context_length=128": "data.context_length is 128, but .*shards was prepared with 64",
        "model.vocabulary_size=513": "model.vocabulary_size is 513, but .*shards was prepared with 512",
    }.items():
        config = load_config(tiny_config(tmp_path), [override])
        with pytest.raises(DataError, match=numbers):
            check_prepared(config, manifest, tiny_data / "shards")


@pytest.mark.parametrize(
    ("sizes", "processes", "arithmetic"),
    [
        ({"tensor_size": 2}, 3, "1 x 1"),
        ({"tensor_size": 2, "context_size": 2, "pipeline_size": 2}, 12, "2 x 2 x 2 = 8, but it is 12"),
        ({"data_size": 3}, 4, "parallel.data_size 3 times .* = 1 calls for 3 processes, not 4; .* 0 or 4, or start 3"),
        ({"data_size": 2, "tensor_size": 2}, 8, "= 2 calls for 4 processes, not 8; .* 0 or 4, or start 4"),
    ],
)
def test_processes_must_be_the_product_of_the_sizes(sizes: dict[str, int], processes: int, arithmetic: str) -> None:
    parallel = QUICKSTART_CONFIG.parallel.model_copy(update=sizes)
    with pytest.raises(ConfigError, match=arithmetic):
        data_parallel_size(QUICKSTART_CONFIG.model_copy(update={"parallel": parallel}), processes)


@given(*(st.integers(1, 4) for _ in range(4)), st.booleans())
def test_the_data_parallel_size_is_the_missing_factor(
    tensor: int, context: int, pipeline: int, data: int, given_too: bool
) -> None:
    sizes = {"tensor_size": tensor, "context_size": context, "pipeline_size": pipeline, "data_size": data * given_too}
    parallel = QUICKSTART_CONFIG.parallel.model_copy(update=sizes)
    config = QUICKSTART_CONFIG.model_copy(update={"parallel": parallel})
    assert data_parallel_size(config, tensor * context * pipeline * data) == data
