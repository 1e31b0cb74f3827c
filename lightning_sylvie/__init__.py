"""Full-graph GNN training across devices, as a PyTorch Lightning strategy."""

from importlib.metadata import PackageNotFoundError, version

from lightning_sylvie.attach import RefusedLayerError
from lightning_sylvie.callbacks import BoundedStaleness, HaloTraffic
from lightning_sylvie.datamodule import GraphDataModule
from lightning_sylvie.gradient import GradientSum
from lightning_sylvie.module import SylvieModule
from lightning_sylvie.optimizer import DistributedOptimizer
from lightning_sylvie.quantizer import AdaptiveBits
from lightning_sylvie.strategy import SylvieStrategy
from lightning_sylvie.transport import PeerError

try:
    __version__ = version("lightning-sylvie")
except PackageNotFoundError:  # used from its source folder
    __version__ = "0+unknown"

__all__ = [
    "AdaptiveBits",
    "BoundedStaleness",
    "DistributedOptimizer",
    "GradientSum",
    "GraphDataModule",
    "HaloTraffic",
    "PeerError",
    "RefusedLayerError",
    "SylvieModule",
    "SylvieStrategy",
]
