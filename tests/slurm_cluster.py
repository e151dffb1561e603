"""A real SLURM of one node, this machine: Debian's munge, slurmctld, slurmd and slurm-client, run as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import free_ports
from waiting import wait_until

PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch"
CONFIG = """
ClusterName=beast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def end_jobs(environment: dict[str, str]) -> None:
    """Those of a test that failed would outlive the daemons."""
    subprocess.run(["scancel", "--user=root"], env=environment, check=True)
    words = ["squeue", "--noheader"]
    wait_until(lambda: not subprocess.run(words, env=environment, capture_output=True).stdout, "a job goes on")


@contextlib.contextmanager
def slurm(place: Path) -> Iterator[dict[str, str]]:
    """The environment of its commands. Skips the test where the programs are missing, or this is not root."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing or os.getuid():
        pytest.skip(f"needs root and {', '.join(missing)}: apt-get install munge slurmctld slurmd slurm-client")
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (place / name).mkdir()
    (place / "slurm.conf").write_text(CONFIG.format(host=host, ports=free_ports(2), place=place))
    (place / "munge.key").write_bytes(os.urandom(128))
    (place / "munge.key").chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}
    files = [f"--{name}-file={place}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    commands = (
        ["munged", "--foreground", "--force", f"--socket={place}/munge.socket", *files],
        ["slurmctld", "-D", "-i", "-f", str(place / "slurm.conf")],
        ["slurmd", "-D", "-N", host, "-f", str(place / "slurm.conf")],
    )

    def state() -> str:
        done = subprocess.run(["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True)
        return done.stdout.strip()

    with contextlib.ExitStack() as to_close:
        with open(place / "daemons.log", "w") as log:
            for number, command in enumerate(commands):
                daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                to_close.callback(daemon.wait)
                to_close.callback(daemon.terminate)
                if number == 0:
                    wait_until((place / "munge.socket").exists, (place / "daemons.log").read_text)
        to_close.callback(end_jobs, environment)
        wait_until(lambda: state() == "idle", lambda: "\n".join(x.read_text() for x in place.glob("*.log")))
        yield environment
