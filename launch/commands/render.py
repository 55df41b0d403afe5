"""`myxa render slurm|k8s|compose`: the job file of a run, for those who start it."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from .parser import Command, Parser

if TYPE_CHECKING:
    from ...core.config import RunConfig

SLURM = """#!/bin/bash
# One launcher a node. Slurm's signal has the run end in order, with a checkpoint, before its time is over;
# `sbatch FILE RUN_DIRECTORY` continues a run.
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$gres#SBATCH --exclusive
#SBATCH --time=$time
#SBATCH --signal=TERM@120

meeting="--rdzv-file $$SLURM_SUBMIT_DIR/rdzv-$$SLURM_JOB_ID --finish-timeout 100"
if [ $$# -gt 0 ]; then
    srun --kill-on-bad-exit=1 myxa resume "$$1" $$meeting
else
    srun --kill-on-bad-exit=1 myxa launch $launch $$meeting
fi
"""
K8S = """# The run file, model and data lie on the volume claim $volume, which is mounted at $folder on every node.
# The nodes' common key, once:
#   head -c 32 /dev/urandom | base64 > job.key && kubectl create secret generic $name-key --from-file=job.key
apiVersion: v1
kind: Service
metadata:
  name: $name
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    app: $name
---
apiVersion: batch/v1
kind: Job
metadata:
  name: $name
spec:
  completionMode: Indexed
  completions: $nodes
  parallelism: $nodes
  backoffLimit: 0
  template:
    metadata:
      labels:
        app: $name
    spec:
      subdomain: $name
      restartPolicy: Never
      terminationGracePeriodSeconds: 120
      containers:
        - name: launcher
          image: "$image"
          workingDir: $folder
          command: ["/bin/sh", "-c"]
          args:
            - exec myxa launch $launch --nnodes $nodes --node-rank $$JOB_COMPLETION_INDEX --rdzv $name-0.$name:29400
              --job-key /etc/myxa/job.key --finish-timeout 100
          resources:
            limits: $limits
          volumeMounts:
            - {name: work, mountPath: $folder}
            - {name: key, mountPath: /etc/myxa, readOnly: true}
            - {name: shm, mountPath: /dev/shm}
      volumes:
        - name: work
          persistentVolumeClaim: {claimName: $volume}
        - name: key
          secret: {secretName: $name-key, defaultMode: 0400}
        - name: shm
          emptyDir: {medium: Memory}
"""
COMPOSE = """# Every node on this machine. The run file, model and data lie in this file's folder, mounted at $folder.
# The nodes' common key, once: head -c 32 /dev/urandom | base64 > job.key && chmod 600 job.key
name: $name
services:
$services"""
SERVICE = """  node$rank:
    image: "$image"
    working_dir: $folder
    command: myxa launch $launch --nnodes $nodes --node-rank $rank --rdzv node0:29400 --job-key $folder/job.key
    volumes: [".:$folder"]
    shm_size: 8gb
    stop_grace_period: 120s
$devices"""
DEVICES = """    deploy:
      resources:
        reservations:
          devices: [{driver: nvidia, count: $gpus, capabilities: [gpu]}]
"""


def _add(parser: Parser) -> None:
    parser.add_argument("kind", choices=("slurm", "k8s", "compose"), help="who starts the launchers")
    parser.add_argument("file", metavar="RUN.TOML", help="run file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
                        help="overrule a value of the file, in the job too; may be repeated")  # fmt: skip
    parser.add_argument("--time", default="12:00:00", metavar="LIMIT", help="slurm: time limit (%(default)s)")
    parser.add_argument("--image", default="myxa", help="k8s, compose: the image with myxa in it (%(default)s)")
    parser.add_argument("--volume", default="work", metavar="CLAIM", help="k8s: the shared volume claim (%(default)s)")
    parser.add_argument("--folder", default="/work", help="k8s, compose: where it is mounted (%(default)s)")


def _render(options: argparse.Namespace) -> int:
    from ...core.config import load_config

    config = load_config([Path(options.file)], options.overrides)
    print(job_file(options.kind, config, options), end="")
    return 0


def num_nodes(config: RunConfig) -> int:
    """The fewest that the roles' `nodes` name."""
    from ..supervisor.placement import started_roles

    roles = [config.roles[role] for role in started_roles(config)]
    named = [node for role in roles if role.nodes != "*" for node in role.nodes]
    return max(named, default=0) + 1


def job_file(kind: str, config: RunConfig, options: argparse.Namespace) -> str:
    """Raises ConfigError for a run name that the scheduler cannot take."""
    from ..supervisor.placement import place

    nodes = num_nodes(config)
    devices = [device for actor in place(config, nodes) for device in (*actor.visible_devices, *actor.devices)]
    gpus = max(devices, default=-1) + 1
    name = config.run.name.lower().replace("_", "-")
    if kind != "slurm" and re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", name) is None:
        raise ConfigError(
            f"run.name = {config.run.name!r} is no name of a {kind} object",
            remedy="use a letter first, then letters, digits and hyphens, 52 at most",
        )
    sets = [word for item in options.overrides for word in ("--set", item)]
    values = {
        "name": name, "nodes": nodes, "gpus": gpus, "time": options.time, "image": options.image,
        "volume": options.volume, "folder": options.folder, "launch": shlex.join([options.file, *sets]),
        "gres": f"#SBATCH --gres=gpu:{gpus}\n" if gpus else "",
        "limits": f"{{nvidia.com/gpu: {gpus}}}" if gpus else "{}",
        "devices": Template(DEVICES).substitute(gpus=gpus) if gpus else "",
    }  # fmt: skip
    services = [Template(SERVICE).substitute(values, rank=rank) for rank in range(nodes)]
    text = {"slurm": SLURM, "k8s": K8S, "compose": COMPOSE}[kind]
    return Template(text).substitute(values, services="".join(services))


RENDER = Command(
    "render", "the job file of a run for Slurm, Kubernetes or Docker Compose", _render, _add,
    "Print a batch script, manifests or a compose file that start a launcher on each node that the run file names, "
    "with the GPUs that its roles name.",
)  # fmt: skip
