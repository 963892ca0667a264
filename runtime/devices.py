"""runtime/devices.py."""

import os
import platform
from pathlib import Path

import torch

from runtime.config import Config, UserError


def pick_devices(config: Config) -> tuple[list[str], list[str]]:
    """Devices of the learners and of the rollout workers, one entry a process.

    CPU: the learners and as many rollout workers as cores are left. One GPU: shared. Several
    GPUs: learners take the first ones, rollout workers the others. Raises UserError.
    """
    gpus = torch.cuda.device_count()
    name = config.device
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    index = name.removeprefix("cuda:")
    if name not in ("cpu", "cuda") and not (name.startswith("cuda:") and index.isdigit()):
        raise UserError(f"--device {config.device}: must be auto, cpu, cuda or cuda:N")
    if name != "cpu" and (gpus == 0 or (index.isdigit() and int(index) >= gpus)):
        raise UserError(f"--device {config.device}: this machine has {gpus} CUDA devices")
    learners = config.learners
    if name == "cpu":
        return ["cpu"] * learners, ["cpu"] * (config.rollout_workers or max(1, cores() - learners))
    if name != "cuda" or gpus == 1:
        one = name if name != "cuda" else "cuda:0"
        return [one] * learners, [one] * (config.rollout_workers or 1)
    training = [f"cuda:{i % gpus}" for i in range(learners)]
    rest = [f"cuda:{i}" for i in range(min(learners, gpus - 1), gpus)]
    workers = config.rollout_workers or len(rest)
    return training, [rest[i % len(rest)] for i in range(workers)]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def set_threads(config: Config, processes: int, device: str = "cpu") -> None:
    """Give this process its share of the cores, and its GPU."""
    torch.set_num_threads(config.threads or max(1, cores() // processes))
    if device != "cpu":
        torch.cuda.set_device(device)


def describe_machine() -> dict:
    """Versions and hardware, for the record of every measurement."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((s.split(":", 1)[1].strip() for s in lines if s.startswith("model name")), cpu)
    return {
        "cpu": f"{cpu} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": cores(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
