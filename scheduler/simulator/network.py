"""The network between simulated processes: delays, losses, splits and one-way silence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtrain.scheduler.chance import Chance


@dataclass(frozen=True)
class NetworkModel:
    """How messages travel.

    A message takes ``least_s`` to ``most_s`` seconds, evenly distributed. Each time it is lost,
    with probability ``loss``, its sender waits ``retry_s`` and sends it again, as TCP does.
    """

    least_s: float = 0.001
    most_s: float = 0.02
    loss: float = 0.0
    retry_s: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.least_s <= self.most_s:
            raise ValueError(
                f"delays: expected 0 < least <= most, got {self.least_s} and {self.most_s}"
            )
        if not 0 <= self.loss < 1 or self.retry_s < 0:
            raise ValueError(f"loss: expected a probability below 1, got {self.loss}")

    def draw(self, chance: Chance) -> float:
        """The time that one message takes, in seconds."""
        delay = chance.uniform(self.least_s, self.most_s)
        while self.loss and chance.random() < self.loss:
            delay += self.retry_s
        return delay


class Network:
    """Who reaches whom, and who reaches the job's log."""

    def __init__(self) -> None:
        self.side: dict[int, int] = {}
        self.log_side = 0
        self.deaf: set[tuple[int, int]] = set()

    @property
    def whole(self) -> bool:
        """Whether everybody reaches everybody and the log."""
        return not self.side and not self.deaf and self.log_side == 0

    def reaches_log(self, worker: int) -> bool:
        """Whether ``worker`` reaches the log."""
        return self.side.get(worker, 0) == self.log_side

    def connected(self, a: int, b: int) -> bool:
        """Whether what worker ``a`` sends reaches worker ``b``."""
        return self.side.get(a, 0) == self.side.get(b, 0) and (a, b) not in self.deaf

    def cut(self, *sides: Iterable[int], log_with: int = 0) -> None:
        """Split the network; the log is on the side number ``log_with``."""
        self.side = {w: i for i, side in enumerate(sides) for w in side}
        self.log_side = log_with

    def keep_apart(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Nothing goes between the two groups; both reach the log."""
        others = list(others)
        self.side, self.log_side = {}, 0
        self.deaf = {pair for a in some for b in others for pair in ((a, b), (b, a))}

    def silence(self, speaker: int, hearer: int) -> None:
        """From now on nothing from ``speaker`` reaches ``hearer``."""
        self.deaf.add((speaker, hearer))

    def heal(self) -> None:
        """Mend the network."""
        self.side, self.log_side, self.deaf = {}, 0, set()
