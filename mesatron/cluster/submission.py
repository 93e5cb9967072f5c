"""`mesatron launch slurm` and `resume`: a config becomes a job that needs nothing but its run folder."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from mesatron.checkpoint.verify import list_checkpoints
from mesatron.cluster import scheduler
from mesatron.cluster.history import History
from mesatron.cluster.job import JOB_FILE, LAUNCH_FOLDER
from mesatron.cluster.scheduler import SCRIPT
from mesatron.config import Config, accumulation_steps, data_parallel_size, dump_config, load_config
from mesatron.errors import ConfigError
from mesatron.files import replace_file
from mesatron.summary import summarize
from mesatron.train.run import compare_with

CONFIG, CODE, REPLACED_CODE, SUBMITTED = "config.yaml", "code", "replaced-code", "submitted.json"
PACKAGES = ("mesatron", "mesatron_kernels", "mesatron_data")
ALLOW_CHANGES = "MESATRON_ALLOW_CHANGES"
"""Environment variable that stands for --allow-changes of the training."""
SETTINGS_LINE = "# settings of `mesatron launch slurm`\n"
FIRST_LEAD_SECONDS, LEAST_LEAD_SECONDS, LEAD_FACTOR = 300, 60, 3
"""Of a run in which nothing was measured yet; of any; times a step and two saves as measured."""


@dataclass(frozen=True)
class Request:
    """What is asked of Slurm: values of sbatch's options by their long names, and pyxis's for srun.

    allow_changes: a run that has a checkpoint goes on although settings that alter the result changed.
    """

    options: Mapping[str, str]
    container: Mapping[str, str]
    allow_changes: bool = False

    @property
    def nodes(self) -> int:
        """Nodes of one job."""
        return int(self.options["nodes"])

    def processes_per_node(self, config: Config) -> int:
        """As the job itself will find them: the config's, or one for each GPU, or one."""
        if config.launch.processes_per_node:
            return config.launch.processes_per_node
        for option in ("gpus-per-node", "gres"):
            for part in self.options.get(option, "").split(","):
                if option == "gpus-per-node" or part.startswith("gpu"):
                    number = part.rpartition(":")[2]
                    if number.isdecimal():
                        return max(1, int(number))
        return 1


@dataclass(frozen=True)
class Plan:
    """A submission that is still to be made: texts of files by their paths, the script to submit, and its runs."""

    files: dict[Path, str]
    script: Path
    run_folders: list[Path]


@dataclass(frozen=True)
class Submission:
    """A job as a run folder knows it; fields as those of `Job`."""

    job: str
    time: float
    command: str
    output: str


def plan(file: Path, overrides: Sequence[str], sweep: Sequence[str], request: Request) -> Plan:
    """What `request` comes to for the config in `file`: one run, or with `sweep` one for each combination of values.

    Raises ConfigError when a config is wrong, when its layout or batch does not fit the nodes and processes asked for,
    or when two points of a sweep are one run.
    """
    points = _points(sweep)
    # With values of the sweep, for those that they replace need not fit.
    whole = load_config(file, [*overrides, *points[0][1]])
    if not sweep:
        files = _job(whole, request)
        return Plan(files, _launch_folder(whole) / SCRIPT, [_launch_folder(whole).parent])
    configs = [load_config(file, [*overrides, *point, f"name={whole.name}-{suffix}"]) for suffix, point in points]
    for folder, number in Counter(config.run_folder for config in configs).items():
        if number > 1:
            raise ConfigError(f"--sweep has {number} points whose run folder is {folder}; give each value once.")
    return plan_array(configs, whole.runs_folder / f"{whole.name}-sweep", whole.name, request)


def plan_array(configs: Sequence[Config], folder: Path, name: str, request: Request) -> Plan:
    """One array job, called `name` and described in `folder`, with a run for each of `configs`; raises as `plan`.

    All get the cluster's signal as early as the slowest of them needs it.
    """
    files = {path: text for config in configs for path, text in _job(config, request).items()}
    launches = [_launch_folder(config) for config in configs]
    script = folder.absolute() / LAUNCH_FOLDER / SCRIPT
    paths = shlex.join(str(launch / CONFIG) for launch in launches)
    choice = f'configs=({paths})\nset -- "${{configs[$SLURM_ARRAY_TASK_ID]}}"'
    output = _output(script.parent, "slurm-%A_%a.out")
    array = {"array": f"0-{len(configs) - 1}", "job-name": name, "output": output}
    time = request.options.get("time", "")
    longest_lead = max(configs, key=lambda config: stop_lead_seconds(config, config.run_folder, time))
    files[script] = _script(longest_lead, request, array, choice)
    return Plan(files, script, [launch.parent for launch in launches])


def submit(plan: Plan) -> str:
    """Write a plan's files and copies of the code that runs now, and submit; returns the job's id.

    Raises ConfigError when a job of one of the runs waits or runs already, or when Slurm refuses. What is not submitted
    leaves every folder as it was.
    """
    for folder in plan.run_folders:
        refuse_active(folder)
    launches = [folder / LAUNCH_FOLDER for folder in plan.run_folders]
    with ExitStack() as undo:
        for path, text in plan.files.items():
            _make_folder(path.parent, undo)
            _replace(path, text, undo)
        for launch in launches:
            _copy_code(launch, undo)
        job = _sbatch(plan.script, launches if launches != [plan.script.parent] else [])
        undo.pop_all()
    for launch in launches:
        shutil.rmtree(launch / REPLACED_CODE, ignore_errors=True)
    return job


def resume(folder: Path) -> str:
    """Submit the script in a run folder again, its lead time as it was measured by now; release a job that Slurm holds.

    In the folder of an array that is for all of its runs. Returns `job ID`, with what was done if that was a release, a
    line for each, or why no job is needed. Raises ConfigError when the run has no such script, when its job waits, runs
    or is held by a person, and when Slurm refuses.
    """
    runs = array_folders(folder)
    newest = [job for run in runs or [folder] if (job := newest_job(run))]
    held = [job.job for job in newest if scheduler.is_held_by_slurm(scheduler.job_fields(job.job, job.command))]
    for name in held:
        scheduler.ask("scontrol", "release", name)
    if held:
        return "\n".join(f"job {name}, which Slurm held, is released" for name in held)
    script = folder.absolute() / LAUNCH_FOLDER / SCRIPT
    if not script.exists():
        raise ConfigError(f"{folder} was not started by `mesatron launch slurm`; start it again as it was started.")
    for run in runs or [folder]:
        refuse_active(run)
    config_file = script.with_name(CONFIG)
    if config_file.exists():  # not there for an array
        config = load_config(config_file)
        steps = config.train.steps
        if (folder / CONFIG).exists() and summarize(folder).step == steps:
            return f"{folder} is complete: step {steps} of {steps} is saved, and no job is needed"
        text = script.read_text()
        limit = re.search(r"(?m)^#SBATCH --time=(\S+)$", text)
        signal = _signal(config, folder, limit[1] if limit else "")
        replace_file(script, [re.sub("(?m)^#SBATCH --signal=.*", f"#SBATCH --signal={signal}", text).encode()])
    return f"job {_sbatch(script, [run / LAUNCH_FOLDER for run in runs])}"


def array_folders(folder: Path) -> list[Path]:
    """The run folders of the array that is described in `folder`, by their numbers; none in a run's own folder."""
    script = folder / LAUNCH_FOLDER / SCRIPT
    found = re.search(r"(?m)^configs=\((.*)\)$", script.read_text()) if script.exists() else None
    return [Path(config).parents[1] for config in shlex.split(found[1])] if found else []


def newest_job(folder: Path) -> Submission | None:
    """The job that was submitted or started last for a run; None for a run that no job knows.

    Last in time: the ids of a cluster that has lost its state begin anew.
    """
    launch = folder / LAUNCH_FOLDER
    known = [_noted(launch / name) for name in (SUBMITTED, JOB_FILE) if (launch / name).exists()]
    newest = max(known, key=lambda submission: submission.time, default=None)
    # The submitted one knows its output better, for scontrol expands a % in a folder's name too. Earlier versions noted
    # an array's last member by the id of all.
    if newest and f"{known[0].job}_".startswith(f"{newest.job}_"):
        return known[0]
    return newest


def refuse_active(folder: Path) -> None:
    """Raise ConfigError when a job of a run waits or runs."""
    newest = newest_job(folder)
    found = scheduler.job_fields(newest.job, newest.command) if newest else {}
    if newest and found.get("JobState") in scheduler.ALIVE:
        if release := release_command(newest, found, folder):
            raise ConfigError(f"Job {newest.job} of {folder} is held ({found['Reason']}); `{release}` releases it.")
        raise ConfigError(
            f"Job {newest.job} of {folder} has not ended; wait for it, or `mesatron launch stop {folder}`."
        )


def release_command(job: Submission, found: Mapping[str, str], folder: Path) -> str:
    """What releases the job of a run, whose fields are `found`; empty when it is not held."""
    if not scheduler.is_held(found):
        return ""
    by_slurm = scheduler.is_held_by_slurm(found)
    return f"mesatron launch resume {folder}" if by_slurm else f"scontrol release {job.job}"


def stop_lead_seconds(config: Config, folder: Path, time: str = "") -> int:
    """How long before its end a job should be told: `launch.lead_seconds`, or several steps and saves as measured.

    Of the latter at most half of `time`, its limit as sbatch takes it: a job that is told as it starts trains nothing.
    Raises ConfigError when `launch.lead_seconds` is no shorter than the limit.
    """
    lead, limit = config.launch.lead_seconds, _limit_seconds(time)
    if lead:
        if lead >= limit:
            raise ConfigError(
                f"launch.lead_seconds is {lead}, so a job with --time={time} would be told to end as it starts; give "
                "it more time, or a shorter lead."
            )
        return lead
    measured = History(folder).slowest_step_and_saves_seconds(config.tokens_per_step)
    lead = FIRST_LEAD_SECONDS if measured is None else max(LEAST_LEAD_SECONDS, round(LEAD_FACTOR * measured))
    return int(min(lead, limit / 2))


def _launch_folder(config: Config) -> Path:
    return config.run_folder.absolute() / LAUNCH_FOLDER


def _job(config: Config, request: Request) -> dict[Path, str]:
    """The config and the script of a run's own job, by their paths."""
    data_size = data_parallel_size(config, request.nodes * request.processes_per_node(config))
    accumulation_steps(config, data_size)
    saved = [info.path for info in list_checkpoints(config.run_folder / "checkpoints") if info.status == "complete"]
    if saved:  # what the training would refuse after its time in the queue
        compare_with(saved[-1], config, request.allow_changes)
    launch = _launch_folder(config)
    own = {"job-name": config.name, "output": _output(launch, "slurm-%j.out")}
    script = _script(config, request, own, f"set -- {shlex.quote(str(launch / CONFIG))}")
    return {launch / CONFIG: dump_config(config), launch / SCRIPT: script}


def _output(launch: Path, name: str) -> str:
    """sbatch's pattern for a file in a launch folder, `name` with its codes.

    Raises ConfigError for a folder that sbatch has no pattern for, or from which Python would not take the code.
    """
    if found := re.search(r"[\\:]", str(launch)):
        raise ConfigError(
            f"{launch} has a {found[0]} in its name, with which Slurm or Python would look elsewhere; choose another "
            "runs_folder."
        )
    return f"{launch}/".replace("%", "%%") + name


def _directive(name: str, value: str) -> str:
    """An option's line in a batch script, in quotes where sbatch would end its value early, or all further options.

    Raises ConfigError for a value that has no place in a line.
    """
    if not value.isprintable():
        raise ConfigError(
            f"--{name} {value!r} has a character that cannot be printed; leave it out, or rename the folder."
        )
    if re.search(r"[\s#'\"\\]", value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{name}={value}\n"


def _limit_seconds(time: str) -> float:
    """Of a time limit as sbatch takes it, such as 90 (minutes), 1:30:00 or 1-12; infinite for none, or if it is odd."""
    days, _, clock = time.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in (*parts, days or "0")) or len(parts) > 3:
        return math.inf
    if not days:  # minutes, minutes:seconds, or hours:minutes:seconds
        parts = parts if len(parts) == 3 else ["0", *parts]
    hours, minutes, seconds = map(int, [*parts, "0", "0"][:3])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or math.inf


def _signal(config: Config, folder: Path, time: str) -> str:
    return f"B:{config.launch.stop_signal}@{stop_lead_seconds(config, folder, time)}"


def _script(config: Config, request: Request, options: Mapping[str, str], arguments: str) -> str:
    """The template with the options in its #SBATCH lines and the settings where it has a place for them.

    `arguments` are shell lines that set the script's first argument to the config in a launch folder.
    """
    text = resources.files("mesatron.cluster").joinpath(SCRIPT).read_text()
    signal = _signal(config, config.run_folder, request.options.get("time", ""))
    whole = {**request.options, **options, "chdir": os.getcwd(), "signal": signal}
    head, separator, body = text.rpartition("#SBATCH ")
    last, _, body = body.partition("\n")
    head += separator + last + "\n"
    for name, value in whole.items():
        line = _directive(name, value)
        head, found = re.subn(rf"(?m)^#SBATCH --{re.escape(name)}=.*\n", lambda _, line=line: line, head)  # type: ignore[misc]
        head += "" if found else line
    container = shlex.join(f"--{name}={value}" for name, value in request.container.items())
    settings = (
        f"{arguments}\n"
        f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH PYTHONPATH="${{1%/*}}/{CODE}"\n'
        "export PYTHONSAFEPATH=1  # else -m takes a mesatron that lies where this was submitted\n"
        f"container=({container})\n" + f"export {ALLOW_CHANGES}=1\n" * request.allow_changes
    )
    return head + body.replace(SETTINGS_LINE, settings)


def _points(sweep: Sequence[str]) -> list[tuple[str, list[str]]]:
    """What to add to the name of its run, and the overrides, for every combination of the values in `key=a,b`."""
    axes = []
    for axis in sweep:
        key, separator, values = axis.partition("=")
        if not separator or not key or not all(values.split(",")):
            raise ConfigError(f"--sweep {axis} is not of the form key=value,value, such as train.peak_lr=1e-3,2e-3.")
        axes.append([(key, value) for value in values.split(",")])
    points = []
    for point in itertools.product(*axes):
        suffix = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in point)
        points.append((re.sub("[^A-Za-z0-9._-]", "_", suffix), [f"{key}={value}" for key, value in point]))
    return points


def _noted(path: Path) -> Submission:
    """What submitted.json or job.json says of a job; earlier versions noted its id, and wrote its output beside."""
    record = json.loads(path.read_text())
    job = record["job"]
    when = record.get("time") or path.stat().st_mtime
    return Submission(job, when, record.get("command", ""), record.get("output") or f"{path.parent}/slurm-{job}.out")


def _make_folder(folder: Path, undo: ExitStack) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        undo.callback(_remove_empty, path)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # somebody else has put something into it
        folder.rmdir()


def _replace(path: Path, text: str, undo: ExitStack) -> None:
    if path.exists():
        undo.callback(replace_file, path, [path.read_bytes()])
    else:
        undo.callback(path.unlink, missing_ok=True)
    replace_file(path, [text.encode()])


def _copy_code(launch: Path, undo: ExitStack) -> None:
    """The packages as they are now, so that what is edited later does not change a job that waits or starts again."""
    folder, replaced = launch / CODE, launch / REPLACED_CODE
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
        undo.callback(replaced.rename, folder)
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def _sbatch(script: Path, members: Sequence[Path] = ()) -> str:
    """Submit and note the job, for an array in the launch folder of each of its members too; returns the id."""
    when = time.time()  # a job may start, and note it, before this returns
    # What the submitting shell was given by a job of its own is not for this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_JOB")}
    job = scheduler.ask("sbatch", "--parsable", str(script), environment=environment).strip().partition(";")[0]
    jobs = {script.parent: job} | {launch: f"{job}_{number}" for number, launch in enumerate(members)}
    command = scheduler.known_fields(job).get("Command", "")
    for launch, own in jobs.items():
        note = Submission(own, when, command, f"{script.parent}/slurm-{own}.out")
        replace_file(launch / SUBMITTED, [json.dumps(asdict(note)).encode()])
    return job
