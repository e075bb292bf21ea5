"""Under which conditions something was measured, and where its figures go: the same for all benchmarks."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

BUSY_LOAD_PER_CORE = 0.5
"""Above this a flush waits for the scheduler more than for the disk, which makes every rival look alike."""


def conditions(**more: Any) -> dict[str, Any]:
    """What a benchmark notes of the machine before it begins, and what it was asked to do."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **more,
        "load_before": os.getloadavg(),
    }


def keep(results: dict[str, Any], file: Path, console: Console) -> None:
    """Write the figures, and say where they are, and whether they mean something.

    Before they are shown: a terminal that went away must not cost the figures of a long run.
    """
    about = results["environment"]
    about["load_after"] = os.getloadavg()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"Figures: {file}")
    load = about["load_before"][0]  # its own work is in what comes after
    if load > BUSY_LOAD_PER_CORE * about["cores"] and not about.get("realtime"):
        console.print(
            f"[yellow]The machine was busy (load {load:.1f}): waiting for the processor hides what each rival costs."
            " Run it alone for figures that mean something.[/]"
        )


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def filesystem(folder: Path) -> str:
    """The type of the filesystem under ``folder``: the longest mount point above it decides."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(len(point), kind) for point, kind in mounts if folder.is_relative_to(point)]
    return max(above)[1]
