"""runtime/devices.py: which process computes where, and what machine this is.

Left out: starting the processes (pipes.py).
"""

import os
import platform
import re
from itertools import cycle, islice
from pathlib import Path

import torch

from fast.memory import keep_memory
from runtime.config import Config, require

CPUINFO = Path("/proc/cpuinfo")


def pick_devices(config: Config) -> tuple[list[str], list[str]]:
    """Devices of the learners and of the rollout workers, one entry a process.

    CPU: the learners and as many rollout workers as cores are left. One GPU: shared. Several
    GPUs: learners take the first ones, rollout workers the others. Raises UserError.
    """
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    groups = {"cpu": ["cpu"], "cuda": gpus, "auto": gpus or ["cpu"]} | {gpu: [gpu] for gpu in gpus}
    devices = groups.get(config.device)
    allowed = f"auto, cpu, cuda or cuda:N (this machine has {len(gpus)} CUDA devices)"
    require(devices, f"--device {config.device}: must be {allowed}")
    others = devices[min(config.team_size, len(devices) - 1) :]
    if devices == ["cpu"]:
        others = devices * max(1, cores() - config.team_size)
    rollouts = config.rollout_workers or len(others)
    return [*islice(cycle(devices), config.team_size)], [*islice(cycle(others), rollouts)]


def own_gpus(config: Config) -> bool:
    """Whether every learner has a GPU of its own."""
    learners, _ = pick_devices(config)
    return learners[0] != "cpu" and len({*learners}) == len(learners)


def take_place(config: Config, number: int) -> str:
    """The device of this process, which gets it and its share of the cores; number: among all
    learners and then all rollout workers."""
    places = sum(pick_devices(config), [])
    set_threads(config, len(places), places[number])
    return places[number]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def set_threads(config: Config, processes: int, device: str) -> None:
    """Give this process its share of the cores, and its GPU."""
    torch.set_num_threads(abs(config.threads) or max(1, cores() // processes))
    keep_memory()
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every shape


def quick_dtype(device: str) -> str:
    """bfloat16 where a device has instructions for it, else float32."""
    return "bfloat16" if device != "cpu" or "bf16" in CPUINFO.read_text() else "float32"


def describe_machine() -> dict:
    """Versions and hardware, for the record of every measurement."""
    named = re.findall("model name.*: (.*)", CPUINFO.read_text()) or [platform.machine()]
    return {
        "cpu": f"{named[0]} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": cores(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
