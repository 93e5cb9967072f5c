"""A real Slurm cluster of a few nodes on this machine: Debian's packages, one set of namespaces a host, no systemd.

A host (`head`, `n1`, `n2` ...) is a process that is the first of its own process ids, with its own host name, shared
memory and network card; when it is killed, everything on that host ends, as by a power cut. All hosts share the files.
Needs root.

    with Cluster(Path("/tmp/c"), nodes=2) as cluster:
        job = cluster.submit("--nodes=2", "job.sh")
        cluster.crash("n2")
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import psutil

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "setpriv", "unshare", "nsenter", "ip")
CONTROLLER, GPUS, CPUS, MEMORY_MB = "head", 2, 16, 64000
FREEZER = Path("/sys/fs/cgroup/freezer")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL"}

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType={proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=1,nohold_on_prolog_fail
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait={kill_wait}
MinJobAge=86400
GresTypes=gpu
NodeName=n[1-{nodes}] CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=20 PreemptMode=OFF
"""
# What a host runs first: it takes its name and its view of the files, and then only reaps what is orphaned.
FIRST_PROCESS = """\
echo "$1" >/proc/sys/kernel/hostname
mount --bind "$2/hosts-$1" /etc/hosts
mount --bind "$2/nsswitch" /etc/nsswitch.conf
mount -t tmpfs tmpfs /dev/shm
[ -z "$3" ] || mount --bind "$3" "$2/cgroup/freezer"
ip link set lo up
trap '' HUP INT TERM
echo up
while :; do sleep 1000 & wait $!; done
"""


def unavailable() -> str | None:
    """Why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    # Debian keeps daemons where a user's PATH does not look.
    os.environ["PATH"] = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} missing; apt-get install slurm-wlm munge iproute2"
    tried = subprocess.run(
        ["unshare", "--fork", "--mount", "--uts", "--pid", "--net", "--mount-proc", "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
    )
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


class Cluster:
    """Nodes n1 .. nN in `folder`, which is made and removed; the path is short, for sockets lie in it.

    `settings` are lines of slurm.conf by their names, in place of those that CONFIGURATION has.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        kill_wait_seconds: int = 5,
        grace_seconds: int = 10,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._lines = settings or {}
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self._kill_wait, self._grace = kill_wait_seconds, grace_seconds
        self._hosts: dict[str, subprocess.Popen[str]] = {}
        self._booted: set[str] = set()
        self._branch = FREEZER / f"mesatron-{os.getpid()}-{folder.name}" if os.access(FREEZER, os.W_OK) else None

    def __enter__(self) -> Cluster:
        self.folder.mkdir(mode=0o755)
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _start(self) -> None:
        for name in ("state", "cgroup/freezer"):
            (self.folder / name).mkdir(parents=True)
        if self._branch:
            self._branch.mkdir()
            (self.folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.folder}/cgroup\n")
        (self.folder / "nsswitch").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        for host in (CONTROLLER, *self.nodes):
            self.write_hosts(host)
        configuration = CONFIGURATION.format(
            folder=self.folder, controller=CONTROLLER, nodes=len(self.nodes), gpus=GPUS, cpus=CPUS, memory=MEMORY_MB,
            kill_wait=self._kill_wait, grace=self._grace,
            proctrack="proctrack/cgroup" if self._branch else "proctrack/linuxproc",
        )  # fmt: skip
        lines = [line for line in configuration.splitlines() if line.partition("=")[0] not in self._lines]
        lines += [f"{name}={value}" for name, value in self._lines.items()]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # Character devices, for Slurm looks at what they are; tasks are only told their numbers.
        for number in range(GPUS):
            os.mknod(self.folder / f"gpu{number}", 0o20666, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        self._boot_host(CONTROLLER)
        munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.on(CONTROLLER, "munged", "--force", *(f"--{key}={self.folder}/munge.{end}" for key, end in munge.items()))
        self.start_controller()
        for node in self.nodes:
            self.boot(node)
        self.wait_for(lambda: self.idle() == self.nodes, 30, "all nodes to be idle")

    def _stop(self) -> None:
        for host in list(self._hosts):
            self._kill(host)
        if self._branch:
            # The kernel takes a moment to let go of a group whose last process has ended.
            end = time.monotonic() + 10
            while self._branch.exists() and time.monotonic() < end:
                for path, _, _ in os.walk(self._branch, topdown=False):
                    _remove_group(Path(path))
        shutil.rmtree(self.folder)

    # --- hosts

    def address(self, host: str) -> str:
        return f"10.77.0.{1 if host == CONTROLLER else 10 + int(host[1:])}"

    def write_hosts(self, host: str, *first_lines: str) -> None:
        """/etc/hosts of a host: every host by its address, after `first_lines`, which win; in force at once."""
        lines = [*first_lines, "127.0.0.1 localhost"]
        lines += [f"{self.address(other)} {other}" for other in (CONTROLLER, *self.nodes)]
        (self.folder / f"hosts-{host}").write_text("\n".join(lines) + "\n")

    def boot(self, node: str) -> None:
        """Power on: namespaces, network card, slurmd."""
        self._boot_host(node)
        if node in self._booted:
            # All hosts have the uptime of this machine, by which Slurm would see the reboot: say it in its place.
            self.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=Node unexpectedly rebooted")
        self._booted.add(node)
        self.start_slurmd(node)

    def start_slurmd(self, node: str) -> None:
        self.on(node, "slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """End the daemon; steps that run go on."""
        self.on(node, "kill", "-KILL", (self.folder / f"slurmd-{node}.pid").read_text().strip())

    def start_controller(self) -> None:
        self.on(CONTROLLER, "slurmctld", "-f", str(self.folder / "slurm.conf"))

    def stop_controller(self) -> None:
        """End it, once it has saved its state; jobs go on."""
        pid = (self.folder / "slurmctld.pid").read_text().strip()
        self.on(CONTROLLER, "kill", pid)
        self.on(CONTROLLER, "bash", "-c", f"while kill -0 {pid}; do sleep 0.1; done")

    def crash(self, node: str) -> None:
        """Power off at once; nobody is told."""
        self._kill(node)

    def unplug(self, node: str) -> None:
        self.on(CONTROLLER, "ip", "link", "set", f"to-{node}", "down")

    def plug(self, node: str) -> None:
        self.on(CONTROLLER, "ip", "link", "set", f"to-{node}", "up")

    def on(self, host: str, *command: str, check: bool = True, **settings: object) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and return when it has ended."""
        program = shutil.which(command[0]) or command[0]  # whatever PATH the command is given
        whole = [*self.prefix(host), program, *command[1:]]
        done = subprocess.run(whole, **self._settings(settings))  # type: ignore[call-overload]
        if check and done.returncode != 0:
            raise RuntimeError(f"{command} on {host} answers {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def prefix(self, host: str) -> list[str]:
        """What, before a command, makes it run on a host."""
        inside = self._first(host).pid
        enter = shutil.which("nsenter") or "nsenter"
        return [enter, f"--target={inside}", "--mount", "--uts", "--pid", "--net", f"--wd={os.getcwd()}", "--"]

    def processes(self, host: str) -> list[psutil.Process]:
        """All processes of a host but its first one and Slurm's own daemons."""
        first = self._first(host)
        daemons = {"slurmd", "slurmctld", "slurmstepd", "munged", "sleep"}
        return [one for one in first.children(recursive=True) if _name(one) not in daemons]

    def _boot_host(self, host: str) -> None:
        # A host ends with the process that started it, however that ends.
        alone = ["setpriv", "--pdeathsig=KILL", "unshare", "--fork", "--kill-child"]
        alone += ["--mount", "--uts", "--pid", "--net", "--mount-proc"]
        arguments = [host, str(self.folder), str(self._branch or "")]
        process = subprocess.Popen(
            [*alone, "bash", "-c", FIRST_PROCESS, "bash", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._hosts[host] = process
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise RuntimeError(f"{host} does not start")
        address = f"{self.address(host)}/24"
        if host == CONTROLLER:
            self.on(host, "ip", "link", "add", "bridge", "type", "bridge")
            self.on(host, "ip", "address", "add", address, "dev", "bridge")
            self.on(host, "ip", "link", "set", "bridge", "up")
            return
        cable, inside = f"to-{host}", str(self._first(host).pid)
        self.on(CONTROLLER, "ip", "link", "delete", cable, check=False)
        # Made in the controller's network by a process that sees this machine's ids. Always the same hardware address:
        # the others still know it after a reboot.
        card = ["name", "eth0", "address", f"02:00:0a:4d:00:{10 + int(host[1:]):02x}", "netns", inside]
        command = ["ip", "link", "add", cable, "type", "veth", "peer", *card]
        network = ["nsenter", f"--target={self._first(CONTROLLER).pid}", "--net", "--"]
        subprocess.run(network + command, check=True)
        self.on(CONTROLLER, "ip", "link", "set", cable, "master", "bridge", "up")
        self.on(host, "ip", "address", "add", address, "dev", "eth0")
        self.on(host, "ip", "link", "set", "eth0", "up")

    def _first(self, host: str) -> psutil.Process:
        return psutil.Process(self._hosts[host].pid).children()[0]

    def _kill(self, host: str) -> None:
        process = self._hosts.pop(host)
        everything = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        psutil.wait_procs(everything, timeout=30)
        if self._branch:  # a reboot leaves no group of old steps
            for path, _, _ in os.walk(self._branch / f"slurm_{host}", topdown=False):
                _remove_group(Path(path))

    # --- Slurm

    def slurm(self, *command: str, check: bool = True, **settings: object) -> str:
        """What a command of Slurm prints, run on the head."""
        return self.on(CONTROLLER, *command, check=check, **settings).stdout

    def submit(self, *arguments: str, **settings: object) -> str:
        """The id of a job that `sbatch` took; `env` replaces the environment and `cwd` the folder."""
        return self.slurm("sbatch", "--parsable", *arguments, **settings).strip()

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.slurm("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """The job's fields once it is in one of `states`, by default any that is an end."""
        wanted = set(states) or ENDED
        self.wait_for(lambda: self.job(job)["JobState"] in wanted, seconds, f"job {job} to be {' or '.join(wanted)}")
        return self.job(job)

    def idle(self) -> list[str]:
        words = self.slurm("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t", check=False).split()
        return [name for name, state in zip(words[::2], words[1::2], strict=True) if state == "idle"]

    def wait_for(self, holds: Callable[[], object], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds} s for {what}")
            time.sleep(0.2)

    def _settings(self, settings: Mapping[str, object]) -> dict[str, object]:
        environment = dict(settings.get("env") or os.environ)  # type: ignore[call-overload]
        environment["SLURM_CONF"] = str(self.folder / "slurm.conf")
        defaults = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 60}
        return defaults | dict(settings) | {"env": environment}


def _remove_group(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        time.sleep(0.05)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "slurmd"


if __name__ == "__main__":
    import tempfile

    missing = unavailable()
    if missing:
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory(prefix="slurm-") as place, Cluster(Path(place) / "c", nodes=3) as tried:
        print("A shell on the head of a cluster of three nodes; sinfo, sbatch ... work here. It ends with the shell.")
        variables = os.environ | {"SLURM_CONF": str(tried.folder / "slurm.conf")}
        subprocess.run([*tried.prefix(CONTROLLER), "bash"], env=variables)
