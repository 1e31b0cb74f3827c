"""Lightning callbacks that go with `SylvieStrategy`."""

from lightning_sylvie.callbacks.staleness import BoundedStaleness
from lightning_sylvie.callbacks.traffic import HaloTraffic

__all__ = ["BoundedStaleness", "HaloTraffic"]
