"""Lightning callbacks that go with `SylvieStrategy`."""

from lightning_sylvie.callbacks.staleness import BoundedStaleness

__all__ = ["BoundedStaleness"]
