"""Makes an unmodified PyG model partition-parallel."""

from lightning_sylvie.attach.attachment import Attachment, Exchange, RefusedLayerError
from lightning_sylvie.attach.message_passing import wants_out_edges
from lightning_sylvie.attach.refusals import REFUSED

__all__ = ["REFUSED", "Attachment", "Exchange", "RefusedLayerError", "wants_out_edges"]
