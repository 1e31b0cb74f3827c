"""A check that all ranks are about to do the same thing."""

from __future__ import annotations

from lightning_sylvie.transport.transport import Transport


def check_signature(transport: Transport, signature: str) -> None:
    """Raises on every rank unless all ranks give the same signature. For debugging.

    Args:
        transport: The ranks to compare; it costs them a round of messages.
        signature: What must agree, such as an exchange's slot, shapes and dtypes.

    Raises:
        RuntimeError: Naming the signatures and the ranks that gave them.
    """
    signatures = transport.all_gather_object(signature)
    if len(set(signatures)) == 1:
        return
    lines = []
    for value in sorted(set(signatures), key=signatures.index):
        ranks = [str(rank) for rank, other in enumerate(signatures) if other == value]
        lines.append(f"  rank {', '.join(ranks)}: {value}")
    raise RuntimeError(
        "the ranks are about to exchange different things; expected the same layers in the same "
        "order on every rank, got\n" + "\n".join(lines)
    )
