"""The command line as a person meets it, in real processes: every mistake against its one line and exit code (2 config,
3 data, 4 checkpoint), and what the verbs print against the files they speak of."""

import json
import math
import os
import pty
import re
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from mesatron_data.stream import ValidationSet
from mesatron_data.tokenizer import Tokenizer

from mesatron.config import Config, load_config
from mesatron.evaluate.checkpoint import load_model
from mesatron.evaluate.generation import generate

ROOT = Path(__file__).parents[2]


def start(
    *arguments: str | Path, environment: dict[str, str] | None = None, errors: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mesatron", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
    )


def mesatron(*arguments: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, environment=environment)
    out, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def output_of(*arguments: str | Path) -> str:
    done = mesatron(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def mistake(code: int, *arguments: str | Path, environment: dict[str, str] | None = None) -> str:
    """The one line that a mistake must end in."""
    done = mesatron(*arguments, environment=environment)
    assert done.returncode == code, done.stderr
    assert re.fullmatch(r"mesatron: [^\n]+\n", done.stderr), done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., Path], trained_run: Path) -> dict:
    """Names for the paths that the cases below speak of."""
    folder = tmp_path_factory.mktemp("places")
    config = tiny_config(folder / "here")
    (folder / "empty").mkdir()
    (folder / "unsaved").mkdir()
    (folder / "unsaved/attempts.jsonl").touch()
    (folder / "broken.yaml").write_text("train: {steps: 1")
    (folder / "failing").mkdir()
    for name in ("manifest.json", "config.yaml"):
        (folder / "failing" / name).symlink_to("/proc/self/mem")  # to read its beginning is an input/output error
    resolved = load_config(config)
    return {
        "config": config, "run": trained_run, "empty": folder / "empty", "unsaved": folder / "unsaved",
        "nowhere": folder / "nowhere", "broken": folder / "broken.yaml", "failing": folder / "failing",
        "shards": resolved.data.folder, "model": resolved.tokenizer.path,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [
        ("config check {nowhere}", 2, "No such file or directory"),
        ("config check {empty}", 2, "Is a directory"),
        ("config check {broken}", 2, "not valid YAML"),
        ("config check {failing}/config.yaml", 11, "Cannot read the config {failing}/config.yaml: Input/output error"),
        ("config check {config} train.peak_lrr=1", 2, "did you mean 'train.peak_lr'?"),
        ("config check {config} train.peak_lr", 2, "is not of the form section.key=value"),
        ("config check {config} train.x\ny=1", 2, "unknown key 'train.x y'"),
        ("config check {config} --processes 3", 2, "8 is no multiple of 2 x 3 = 6"),
        ("config check {config} data.context_length=32", 3, "is 32, but {shards} was prepared with 64"),
        ("config check {config} model.vocabulary_size=600", 3, "is 600, but {shards} was prepared with 512"),
        ("train {nowhere}", 2, "No such file or directory"),
        ("train {config} --processes 3", 2, "8 is no multiple of 2 x 3 = 6"),
        ("tokenizer train {config} model.vocabulary_size=600", 3, "{model} holds another tokenizer"),
        ("tokenizer train {config} train.seed=1", 3, "{model} holds another tokenizer"),
        ("tokenizer train {config} tokenizer.path={empty} data.input_folder={nowhere}", 3, "No folder {nowhere}/train"),
        ("tokenizer train {config} tokenizer.path={empty} model.vocabulary_size=20", 3, "tokenizer of 20 pieces"),
        ("tokenizer train {config} tokenizer.path={config}", 3, "tokenizer.path {config} is a tokenizer already"),
        ("data prepare {config} data.context_length=32", 3, "{shards} was prepared from other input or settings"),
        ("data prepare {config} data.folder={nowhere} data.input_folder={empty}", 3, "No folder {empty}/train"),
        ("data prepare {config} data.folder={nowhere} tokenizer.path={empty}", 3, "Cannot read the tokenizer"),
        ("data prepare {config} --task 3", 2, "--task 3 is not of the form K/N"),
        ("data prepare {config} --task 2/2", 2, "--task 2/2: there is no such task; N tasks count from 0 to N - 1"),
        ("data prepare {config} data.folder={nowhere} model.vocabulary_size=600", 3, "{model} has 512 pieces"),
        ("train {config} runs_folder={broken}", 2, "Cannot make the run folder"),
        ("summary {run}/checkpoints/latest", 2, "is a checkpoint; give the run folder"),
        ("data verify {empty}", 3, "No manifest.json in {empty}"),
        ("data verify {nowhere}", 3, "No manifest.json in {nowhere}"),
        ("data verify {failing}", 11, "Cannot read {failing}/manifest.json: Input/output error; start the same"),
        ("data inspect {config}", 3, "Cannot read {config}/manifest.json: Not a directory"),
        ("summary {empty}", 2, "{empty} is no run folder"),
        ("summary {nowhere}", 2, "{nowhere} is no run folder"),
        ("summary {config}", 2, "{config} is no run folder"),
        ("checkpoint list {empty}", 2, "{empty} is no run folder"),
        ("checkpoint list {unsaved}", 2, "{unsaved} has no checkpoints yet"),
        ("checkpoint verify {empty}", 4, "{empty} is no complete checkpoint"),
        ("checkpoint verify {failing}", 11, "Cannot use {failing}/manifest.json: Input/output error; start the same"),
        ("checkpoint verify {nowhere}", 4, "{nowhere} is no complete checkpoint"),
        ("checkpoint inspect {config}", 4, "There is no run or checkpoint folder {config}"),
        ("evaluate perplexity {empty}", 4, "{empty} holds no complete checkpoint"),
        ("evaluate perplexity {run} --json {empty}/no/x.json", 2, "There is no folder {empty}/no for x.json"),
        ("evaluate perplexity {run} --data {empty}", 3, "No manifest.json in {empty}"),
        ("prove {nowhere} --mixer s4", 2, "--mixer 's4' is no mixer; known are mesa, transformer, "),
        ("prove {nowhere} --mixer ", 2, "--mixer '' is no mixer; known are mesa, "),
        (
            "prove {nowhere} --core --layout TP3",
            2,
            "--layout 'TP3' is no layout here; known are TP2, ZeRO-1, documents; ",
        ),
        ("generate {run} --prompt a --data {empty}", 3, "No manifest.json in {empty}"),
        ("generate {nowhere} --prompt a", 4, "There is no run or checkpoint folder {nowhere}"),
    ],
)
def test_mistakes_end_in_one_line(places: dict, command: str, code: int, expected: str) -> None:
    line = mistake(code, *(word.format(**places) for word in command.split(" ")))
    assert expected.format(**places) in line


@pytest.mark.parametrize("key", ["model.mesa.implementation", "model.implementation"])
def test_triton_needs_a_gpu(places: dict, key: str) -> None:
    settings = [f"{key}=triton", f"runs_folder={places['nowhere']}-runs"]
    line = mistake(2, "train", places["config"], *settings, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert line == f"mesatron: {key} is triton, which needs a GPU; choose torch or auto here.\n"


def test_another_tokenizer_of_the_same_size_is_noticed(tmp_path: Path, places: dict) -> None:
    """Its ids would mean other words: perplexities and texts would be wrong, and look right."""
    own = [f"tokenizer.path={tmp_path}/tokenizer", f"data.folder={tmp_path}/shards", "train.seed=1"]
    own.append("tokenizer.sample_bytes=50000")
    output_of("tokenizer", "train", places["config"], *own)
    output_of("data", "prepare", places["config"], *own)
    line = mistake(3, "evaluate", "perplexity", str(places["run"]), "--data", f"{tmp_path}/shards")
    assert "has another tokenizer" in line


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("frobnicate", "No such command 'frobnicate' (see 'mesatron --help')."),
        ("launch stauts", "No such command 'stauts'. Did you mean 'status'? (see 'mesatron launch --help')."),
        ("train", "Missing argument 'FILE' (see 'mesatron train --help')."),
        ("generate {run}", "Missing option '--prompt' (see 'mesatron generate --help')."),
        ("generate {run} --prompt a --temperature nan", "Invalid value for '--temperature': "),
        ("summary", "Missing argument 'RUN' (see 'mesatron summary --help')."),
        ("summary {run} --no", "No such option: --no (see 'mesatron summary --help')."),
        ("train {run} --processes", "Option '--processes' requires an argument (see 'mesatron --help')."),
        ("prove {run} --core=1", "Option '--core' does not take a value (see 'mesatron --help')."),
    ],
)
def test_wrong_usage_is_said_in_one_line(places: dict, command: str, expected: str) -> None:
    assert mistake(2, *(word.format(**places) for word in command.split())).startswith(f"mesatron: {expected}")


@pytest.mark.parametrize("command", ["", "launch"])
def test_without_a_verb_it_helps(command: str) -> None:
    done = mesatron(*command.split())
    assert done.returncode == 2
    assert "Usage: " in done.stderr
    assert "Commands:" in done.stderr


def test_short_questions_are_answered() -> None:
    assert output_of("--version") == f"mesatron {metadata.version('mesatron')}\n"
    assert output_of("launch", "stop", "-h") == output_of("launch", "stop", "--help")


def test_a_reader_that_leaves_gets_no_traceback(places: dict) -> None:
    command = [sys.executable, "-u", "-m", "mesatron", "config", "check", str(places["config"])]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [
        ("config check {nowhere} <&- >&-", 2, "Cannot read the config {nowhere}: No such file or directory"),
        ("config check {nowhere} 2>&-", 2, ""),
        ("config check {nowhere} 2>/dev/full", 2, ""),
        ("config check {config} >&- 2>&-", 0, ""),
        ("config check {config} >/dev/full", 7, "No space left for the output or a temporary file"),
    ],
)
def test_closed_and_full_outputs(places: dict, command: str, code: int, expected: str) -> None:
    shell = f"{shlex.quote(sys.executable)} -m mesatron {command.format(**places)}"
    done = subprocess.run(["sh", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"mesatron: {expected.format(**places)}" if expected else "")
    assert done.stderr.count("\n") == bool(expected)


def test_letters_that_the_locale_lacks() -> None:
    program = "import sys; from mesatron.terminal import open_streams; open_streams(); print('ü“')"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    assert subprocess.check_output([sys.executable, "-c", program], env=environment) == b"\xfc\\u201c\n"


def test_a_locale_without_letters(places: dict) -> None:
    """Torch reads sources of its own in the locale's encoding."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "mesatron", "train", places["config"], "name=ü"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("mesatron: Text is ASCII here, ")
    assert done.stderr.count("\n") == 1


def test_a_current_folder_that_has_been_removed(tmp_path: Path, places: dict) -> None:
    """Python and torch would end with words of their own."""
    (tmp_path / "here").mkdir()
    shell = f"cd here && rmdir ../here && {shlex.quote(sys.executable)} -m mesatron train {places['config']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("mesatron: The current folder has been removed; ")
    assert done.stderr.count("\n") == 1


def test_no_more_threads() -> None:
    program = """
import resource, threading
from mesatron.errors import foreseen
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
threading.stack_size(2**31)
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    print(foreseen(error))
"""
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.startswith("No more threads or processes may be started here (can't start new thread); raise the limit")


def test_a_fault_leaves_no_temporary_folder(places: dict, short_path: Path, tmp_path: Path) -> None:
    arguments = [str(places["config"]), f"tokenizer.path={tmp_path}", "model.vocabulary_size=20", "--workers=2"]
    done = subprocess.run(
        [sys.executable, "-m", "mesatron", "tokenizer", "train", *arguments], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"TMPDIR": str(short_path)},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert not list(short_path.glob("pymp-*"))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


@pytest.fixture
def run_copy(tmp_path: Path, trained_run: Path) -> Path:
    return shutil.copytree(trained_run, tmp_path / "run", symlinks=True)


def test_checkpoint_verify_passes_over_no_damage(run_copy: Path) -> None:
    newest = run_copy / "checkpoints/step-00000006"
    assert output_of("checkpoint", "verify", run_copy).count("is sound") == 2
    flip_a_byte(newest / "optimizer-00000.safetensors")
    done = mesatron("checkpoint", "verify", run_copy)
    assert done.returncode == 4
    assert done.stdout == f"{run_copy}/checkpoints/step-00000003 is sound.\n"
    assert f"{newest} is damaged: the checksum of optimizer-00000.safetensors differs: tensor exp_avg" in done.stderr
    (newest / "weights-00000.safetensors").unlink()
    assert "weights-00000.safetensors is missing" in mesatron("checkpoint", "verify", run_copy).stderr
    listed = output_of("checkpoint", "list", run_copy).splitlines()
    assert [line.split()[1] for line in listed] == ["complete", "damaged"]
    shutil.rmtree(run_copy / "checkpoints")
    (run_copy / "checkpoints").mkdir()
    assert "holds no checkpoint" in mistake(4, "checkpoint", "verify", run_copy)


def test_a_checkpoint_that_does_not_fit_its_config(run_copy: Path) -> None:
    checkpoint = run_copy / "checkpoints/step-00000006"
    config = checkpoint / "config.yaml"
    config.write_text(config.read_text().replace("width: 36", "width: 18").replace("head_dim: 18", "head_dim: 9"))
    line = mistake(4, "generate", checkpoint, "--prompt", "a")
    assert "belongs to another model: tensor embedding.weight has shape [512, 36] there and [512, 18]" in line


def test_a_damaged_shard_is_named(tmp_path: Path, tiny_data: Path) -> None:
    shards = shutil.copytree(tiny_data / "shards", tmp_path / "shards")
    shard = next((shards / "train").rglob("*.mds*"))
    flip_a_byte(shard)
    assert str(shard) in mistake(3, "data", "verify", shards)


def test_config_check_takes_as_few_processes_as_a_layout_needs(places: dict) -> None:
    text = output_of("config", "check", places["config"], "parallel.tensor_size=2", "parallel.data_size=2")
    assert text.endswith("# processes        4 = 2 tensor x 1 context x 2 data x 1 pipeline\n")


def test_config_check_prints_the_resolved_config_and_its_arithmetic(places: dict) -> None:
    text = output_of("config", "check", places["config"], "train.peak_lr=2e-3", "--processes", "2")
    config = Config.model_validate(yaml.safe_load(text))
    assert config == load_config(places["config"], ["train.peak_lr=2e-3"])
    assert f"# parameters       {config.model.parameter_count():,}\n" in text
    assert "# tokens per step  512 = 8 sequences x 64 tokens\n" in text
    assert "# global batch     8 = 2 micro x 2 accumulation x 2 data-parallel\n" in text
    assert "# steps            6 = 3,072 tokens\n" in text


def test_what_is_there_already_is_left_alone(places: dict) -> None:
    model = places["model"] / "tokenizer.model"
    before = model.stat().st_mtime_ns
    assert output_of("tokenizer", "train", places["config"]) == f"{places['model']} is there already: 512 pieces.\n"
    assert "was there already" in output_of("data", "prepare", places["config"])
    assert model.stat().st_mtime_ns == before


def test_a_tokenizer_and_shards_are_made_from_text(tmp_path: Path, places: dict) -> None:
    for split, documents in {"train": 30, "validation": 3}.items():
        record = json.dumps({"text": "To be or not to be, that is the question. " * 9, "meta": {}})
        (tmp_path / "raw" / split).mkdir(parents=True)
        (tmp_path / "raw" / split / "a.jsonl").write_text(f"{record}\n" * documents)
    own = [
        f"tokenizer.path={tmp_path}/tokenizer",
        f"data.folder={tmp_path}/shards",
        f"data.input_folder={tmp_path}/raw",
    ]
    own += ["model.vocabulary_size=290", "data.context_length=32"]
    assert "290 pieces from 30 of 30 documents" in output_of("tokenizer", "train", places["config"], *own)
    assert "sequences of 32 tokens" in output_of("data", "prepare", places["config"], *own)
    shown = output_of("data", "inspect", tmp_path / "shards", "--samples", "1")
    assert "30 documents" in shown
    assert shown.count("--- sequence") == 1
    assert "that is the question" in shown
    assert "text that came before: 29 documents" in shown
    page = tmp_path / "page.html"
    assert output_of("data", "inspect", tmp_path / "shards", "--html", page) == f"{page} written.\n"
    assert f"{page} exists" in mistake(2, "data", "inspect", tmp_path / "shards", "--html", page)
    assert "that is the question" in page.read_text()
    own += [f"data.folder={tmp_path}/others", "data.packing=best_fit"]
    own += ["data.weights={unknown: 1}", f"data.token_folder={tmp_path}/tokens"]
    printed = output_of("data", "prepare", places["config"], *own)
    assert "packing, best_fit: " in printed


def test_summary_is_that_of_the_metrics(run_copy: Path) -> None:
    metrics = run_copy / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    perplexities = [line["validation/perplexity"] for line in lines if "validation/perplexity" in line]
    speed = statistics.median_high(line["train/tokens_per_second"] for line in lines if "train/loss" in line)
    text = output_of("summary", run_copy)
    for expected in (
        "steps                  6 of 6\n",
        "tokens seen            3,072\n",
        f"validation perplexity  {perplexities[0]:.2f} untrained, {perplexities[-1]:.2f} now\n",
        f"tokens per second      {speed:,.0f} (median)\n",
        f"checkpoint             {run_copy}/checkpoints/step-00000006\n",
        f"--logdir {run_copy}/tensorboard\n",
    ):
        assert expected in text
    with metrics.open("a") as file:
        file.write('{"step": 7, "train/lo')
    assert output_of("summary", run_copy) == text, "a line torn by a kill counts for nothing"
    metrics.unlink()
    shutil.rmtree(run_copy / "checkpoints")
    fresh = output_of("summary", run_copy)
    assert "0 of 6" in fresh
    assert "not measured untrained, not measured now" in fresh


def test_evaluate_and_inspect(trained_run: Path) -> None:
    checkpoint, _, *rows = output_of("evaluate", "perplexity", trained_run).splitlines()
    assert checkpoint == f"{trained_run}/checkpoints/step-00000006"
    table = {row[0]: [float(figure.replace(",", "")) for figure in row[1:]] for row in map(str.split, rows)}
    tokens, loss, perplexity = table.pop("all")
    assert sum(row[0] for row in table.values()) == tokens
    assert sum(row[0] * row[1] for row in table.values()) / tokens == pytest.approx(loss, abs=1e-4)
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert perplexity < 800, "below the untrained model's"
    inspected = output_of("checkpoint", "inspect", trained_run).splitlines()
    assert inspected[0] == checkpoint
    assert "embedding.weight  [512, 36]" in inspected


@pytest.fixture
def terminal() -> Iterator[tuple[int, Callable[[str], str]]]:
    """The end of a terminal to give to a process, and what waits until it shows a text and returns all it has shown."""
    ours, theirs = pty.openpty()
    shown = ""

    def wait(text: str) -> str:
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown and time.monotonic() < end:
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 4096).decode()
        assert text in shown, shown
        return shown

    yield theirs, wait
    os.close(ours)
    os.close(theirs)


VISIBLE = {"TERM": "xterm", "COLUMNS": "120"}


def test_evaluation_shows_on_a_terminal_how_far_it_is(trained_run: Path, terminal: tuple) -> None:
    theirs, wait = terminal
    process = start("evaluate", "perplexity", trained_run, errors=theirs, environment=VISIBLE)
    batches = len(ValidationSet(load_config(trained_run / "config.yaml").data.folder, 64))
    wait(f"0 of {batches} batches")
    wait(f"{batches} of {batches} batches")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith(f"{trained_run}/checkpoints/step-00000006\n")
    assert "batches" not in out


def test_layouts_are_under_way_before_the_first_row(places: dict, terminal: tuple) -> None:
    theirs, wait = terminal
    process = start("bench", "layouts", places["config"], errors=theirs, environment=VISIBLE)
    assert "tokens/s" not in wait("0 of 1")
    process.send_signal(signal.SIGINT)
    wait("mesatron: interrupted")
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_generate_prints_what_the_model_draws(trained_run: Path) -> None:
    trained = load_model(trained_run)
    tokenizer = Tokenizer.load(trained.config.data.folder)
    prompt = torch.tensor([tokenizer.bos_id, *tokenizer.encode("One day")], device=trained.device)
    drawn = list(generate(trained.model, prompt, 40, temperature=1.0, top_p=0.9, seed=4))
    text = tokenizer.decode(drawn[: drawn.index(tokenizer.bos_id)] if tokenizer.bos_id in drawn else drawn)
    assert len(text) > 30
    options = ["--max-new-tokens", "40", "--temperature", "1", "--top-p", "0.9", "--seed", "4"]
    assert output_of("generate", trained_run, "--prompt", "One day", *options) == f"One day{text}\n"


def test_an_interrupt_ends_in_one_line(trained_run: Path) -> None:
    endless = start("generate", trained_run, "--prompt", "One day", "--max-new-tokens", "100000000")
    assert endless.stdout is not None
    endless.stdout.read(20)
    endless.send_signal(signal.SIGINT)
    _, errors = endless.communicate(timeout=30)
    assert endless.returncode == 130
    assert re.fullmatch(r"mesatron: interrupted[^\n]*\n", errors)
