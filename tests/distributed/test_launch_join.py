"""``dtrain join``: supervisors of more workers, and their end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess

from launch_workshop import HERE, Workshop, graph_store, until, workshop

__all__ = ["graph_store", "workshop"]

JOIN = """
import sys
from dtrain.launch import join
join.WORKER_MODULE = "worker_module"
sys.exit(join.join("run", int(sys.argv[1])))
"""

WORKER_MODULE = """
import sys, launch_stubs
if __name__ == "__main__":
    folder = sys.argv[sys.argv.index("--run-dir") + 1]
    sys.exit(launch_stubs.main(["joins", sys.argv[1], folder]))
"""


def join(workshop: Workshop, workers: int) -> subprocess.Popen[str]:
    paths = f"{HERE}:{workshop.path}"
    return workshop.start("-c", JOIN, str(workers), PYTHONPATH=paths)


def joined(workshop: Workshop) -> dict[int, list[object]]:
    files = workshop.run.glob("joined-*")
    return {int(f.name.partition("-")[2]): json.loads(f.read_text()) for f in files}


def test_joiners_get_numbers_of_their_own_and_leave_when_told(workshop: Workshop) -> None:
    (workshop.path / "worker_module.py").write_text(WORKER_MODULE)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        first = workshop.supervise(
            "leaves_alone",
            RANK="0",
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        workshop.wait_for_trainer()
        two = join(workshop, 2)
        until(lambda: len(joined(workshop)) == 2, "two joiners")
        assert joined(workshop) == {
            1000: [1000, 2, 1, port, False],
            1001: [1001, 2, 2, port, False],
        }
        two.terminate()
        _, err = two.communicate(timeout=20)
        assert two.returncode == 0, err
        assert {e["worker"] for e in workshop.events("trainer_left")} == {1000, 1001}

        # The numbers are not used again, the devices are.
        one = join(workshop, 1)
        until(lambda: len(joined(workshop)) == 3, "another joiner")
        assert joined(workshop)[1002] == [1002, 2, 1, port, False]
        one.send_signal(signal.SIGKILL)
        until(lambda: len(workshop.events("trainer_left")) == 3, "its leaving")
        first.terminate()
        first.communicate(timeout=20)
