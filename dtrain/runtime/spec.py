"""What the supervisor hands to the trainer that it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainerSpec:
    """Everything a trainer needs to know about its run and its place in it (picklable).

    ``config``: the resolved configuration (``Config.model_dump(mode="json")``).
    ``run_dir``: absolute path of the run folder. ``worker``: torchrun's global rank.
    ``node``: its host's name. ``domains``: failure domains from the largest to the node.
    ``host_store``: this worker must host the TCPStore itself, no torchrun agent does.
    ``incarnation``: fresh uuid hex for each start of a trainer process.
    ``json_output``: worker 0 prints run.json as the last line of stdout.
    ``progress``: worker 0 draws a progress bar.
    """

    config: dict[str, Any]
    run_dir: str
    worker: int
    world_size: int
    local_rank: int
    node: str
    domains: tuple[str, ...]
    store_host: str
    store_port: int
    host_store: bool
    incarnation: str
    supervisor_pid: int
    json_output: bool
    progress: bool
