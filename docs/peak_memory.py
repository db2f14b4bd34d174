"""Run a command and print the peak memory of all processes that it starts.

python docs/peak_memory.py COMMAND [ARGUMENT]...

RSS counts what processes share (the graph's mapped files, the preloaded libraries) once for each of
them; PSS divides it among them, so the sum over processes is what the job takes from the machine.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

_EVERY_S = 0.5
_GIB = 2**20  # in KiB, as /proc counts


def main(*command: str) -> int:
    """Returns the command's exit code."""
    job = subprocess.Popen(command)
    rss: dict[int, int] = {}
    names: dict[int, str] = {}
    most_pss = 0
    while job.poll() is None:
        pss = 0
        for pid in family(job.pid):
            peak = field(pid, "status", "VmHWM")
            if peak:
                rss[pid] = peak
                names[pid] = name_of(pid)
            pss += field(pid, "smaps_rollup", "Pss")
        most_pss = max(most_pss, pss)
        time.sleep(_EVERY_S)
    for pid, peak in sorted(rss.items(), key=lambda item: -item[1])[:8]:
        print(f"peak RSS {peak / _GIB:6.2f} GiB  {names[pid]}", file=sys.stderr)
    print(
        f"{len(rss)} processes: peak RSS at most {max(rss.values(), default=0) / _GIB:.2f} GiB, "
        f"{sum(rss.values()) / _GIB:.2f} GiB in sum; peak of the summed PSS "
        f"{most_pss / _GIB:.2f} GiB",
        file=sys.stderr,
    )
    return job.returncode


def family(root: int) -> list[int]:
    """The process and its descendants, by the parents that /proc names."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(field(int(entry.name), "status", "PPid"), []).append(
                int(entry.name)
            )
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def field(pid: int, file: str, name: str) -> int:
    """A number in a file of /proc/PID, 0 when the process is gone or lacks it."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def name_of(pid: int) -> str:
    """The command line, shortened."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace")[:100]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
