"""Gives lazy layers (``in_channels=-1``) their sizes before optimizers and other ranks see them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parameter import is_lazy as _is_lazy
from torch.utils._pytree import tree_leaves

from lightning_sylvie.module import SylvieModule


def is_lazy(module: torch.nn.Module) -> bool:
    """Whether a parameter or buffer has no size yet."""
    return any(map(_is_lazy, [*module.parameters(), *module.buffers()]))


def initialize(module: LightningModule, data: Any) -> None:
    """One forward in evaluation mode, without gradients.

    Args:
        module: A `SylvieModule`; how to call another module is not known.
        data: This rank's part, with its exchange in force.

    Raises:
        ValueError: For a module of another class.
    """
    if not isinstance(module, SylvieModule):
        names = [name for name, parameter in module.named_parameters() if _is_lazy(parameter)]
        raise ValueError(
            f"expected parameters with a size, got {names[0]} and {len(names) - 1} others without: "
            "give the layers their in_channels in place of -1, or call the model once on the graph "
            "in configure_model: with torch.no_grad(): self.gnn(data.x, data.edge_index)"
        )
    training = module.training
    with torch.no_grad():
        module.eval()(data)
    module.train(training)


def first_loader(trainer: Trainer) -> Any:
    """A loader of the stage that begins; before Lightning itself asks for them."""
    loop = trainer._active_loop
    assert loop is not None
    given = loop._data_source.dataloader()
    return tree_leaves(getattr(given, "flattened", given))[0]
