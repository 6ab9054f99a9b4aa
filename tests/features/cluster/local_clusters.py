"""Clusters of one machine for tests: SLURM from its daemons, without systemd."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
SrunPortRange={srun_ports}
AuthType=auth/munge
AuthInfo=socket={munge}/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=0
SlurmdParameters=config_overrides
KillWait=5
SchedulerParameters=bf_interval=1,sched_min_interval=100000
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000

PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def local_slurm(folder: Path) -> Iterator[str]:
    """Run SLURM with one node of four cores; yield its SLURM_CONF. Skips the test without SLURM."""
    if missing := [
        name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]:
        pytest.skip(f"SLURM is not installed: {', '.join(missing)} not found")
    if os.getuid():
        pytest.skip("slurmd needs root")
    munge = folder / "munge"
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(parents=True, mode=0o700)
    key = munge / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    ctld_port, d_port = free_port(), free_port()
    first = free_port()
    configuration = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    configuration.write_text(
        CONFIGURATION.format(
            host=host, folder=folder, munge=munge, ctld_port=ctld_port, d_port=d_port,
            srun_ports=f"{first}-{first + 20}",
        )
    )  # fmt: skip
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    files = [f"--{name}={munge}/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    with ExitStack() as stack:

        def start(*command: str) -> None:
            log = stack.enter_context((folder / f"{command[0]}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(end, process)

        start("munged", "--foreground", "--force", f"--key-file={key}", *files)
        wait_for(lambda: (munge / "socket").exists(), folder)
        start("slurmctld", "-D", "-f", str(configuration))
        start("slurmd", "-D", "-f", str(configuration))
        command = ["sinfo", "--noheader", "--format=%T", f"--nodes={host}"]
        wait_for(lambda: b"idle" in subprocess.run(command, capture_output=True, env=environment).stdout, folder)
        stack.callback(cancel_jobs, environment)
        yield str(configuration)


def cancel_jobs(environment: dict[str, str]) -> None:
    """Cancel all jobs and wait for their processes."""
    subprocess.run(["scancel", "--user=root"], env=environment, check=False)
    command = ["squeue", "--noheader"]
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s and subprocess.run(command, capture_output=True, env=environment).stdout:
        time.sleep(0.2)


def end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], folder: Path) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        logs = {path.name: path.read_text(errors="replace")[-500:] for path in folder.glob("*.log")}
        assert time.monotonic() < end_s, f"SLURM has not started: {logs}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
