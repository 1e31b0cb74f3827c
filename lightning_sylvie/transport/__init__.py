"""Moves messages between ranks: the group that carries halo rows, and how it fails."""

from lightning_sylvie.transport.all_to_all import AllToAll
from lightning_sylvie.transport.connect import connect
from lightning_sylvie.transport.failure import PeerError
from lightning_sylvie.transport.loopback import Loopback
from lightning_sylvie.transport.point_to_point import PointToPoint
from lightning_sylvie.transport.signature import check_signature
from lightning_sylvie.transport.transport import Pending, Transport

__all__ = [
    "Transport",
    "Pending",
    "Loopback",
    "PointToPoint",
    "AllToAll",
    "PeerError",
    "connect",
    "check_signature",
]
