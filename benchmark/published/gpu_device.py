"""`python -m benchmark.published.gpu_device TABLE.csv` adds a row that says which GPU was measured,
and how many other programs used it."""

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from benchmark.published.gpu_profile import add


def asked(*what: str) -> list[str]:
    """The lines that nvidia-smi answers; none if it isn't there."""
    try:
        return subprocess.check_output(["nvidia-smi", *what], text=True).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def row() -> dict:
    others = asked("--query-compute-apps=pid", "--format=csv,noheader")
    drivers = asked("--query-gpu=driver_version", "--format=csv,noheader")
    cuda = torch.cuda.is_available()
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%FT%TZ}",
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "driver": drivers[0] if drivers else "none",
        "others": len(others),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "processor": processor(),
    }


if __name__ == "__main__":
    add(Path(sys.argv[1]), row())
