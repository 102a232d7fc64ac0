"""What measurements depend on besides the models: the processor, its clock, and versions of the libraries."""

import functools
import platform
import time
from pathlib import Path

import torch
import transformers


def versions() -> dict[str, str]:
    """Of everything that numbers depend on."""
    from . import __version__

    return {
        "hf_dspark": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def processor(device: torch.device) -> str:
    """The name of the GPU, or of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def now(device: torch.device) -> float:
    """Seconds of a clock, after all that a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@functools.lru_cache(maxsize=1)
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
