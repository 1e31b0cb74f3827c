"""Graphs of PyG and OGB by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch_geometric.datasets as datasets
from torch_geometric.data import Data

DOWNLOADS = Path("data")  # where PyG and OGB keep what they download and convert
CLASSES = {
    "Planetoid": ("Cora", "CiteSeer", "PubMed"),
    "Amazon": ("Computers", "Photo"),
    "Coauthor": ("CS", "Physics"),
    "CitationFull": ("Cora_ML", "DBLP"),
    "HeterophilousGraphDataset": ("Tolokers", "Minesweeper"),
}
"""Classes of PyG that hold several datasets, and their names."""


def named_graph(name: str, folder: str | Path = DOWNLOADS) -> Data:
    """A node-classification graph by the name of its dataset, in any case.

    Args:
        name: One of `CLASSES`; a class of PyG that is one dataset of one graph (``"Reddit"``,
            ``"Yelp"``, ``"AmazonProducts"``); or a name of OGB (``"ogbn-arxiv"``).
        folder: Where the dataset lies, or is downloaded to.

    Raises:
        ValueError: If no dataset has this name, or it holds several graphs.
        ModuleNotFoundError: For a name of OGB without the package ogb.
    """
    folder = Path(folder)
    for kind, names in CLASSES.items():
        for known in names:
            if known.lower() == name.lower():
                return _only(getattr(datasets, kind)(str(folder / kind), known))
    if name.lower().startswith("ogbn-"):
        return _ogb(name.lower(), folder)
    for known in datasets.__all__:
        if known.lower() == name.lower():
            return _only(getattr(datasets, known)(str(folder / known)))
    raise ValueError(
        f"expected a file or a dataset, such as {sorted(sum(CLASSES.values(), ()))}, got {name!r}"
    )


def _only(dataset: Any) -> Data:
    if len(dataset) != 1:
        raise ValueError(f"expected a dataset of one graph, got {len(dataset)}: {dataset}")
    return dataset[0]


def _ogb(name: str, folder: Path) -> Data:
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"expected ogb for {name!r}: pip install ogb") from error
    dataset = PygNodePropPredDataset(name, str(folder))
    data = _only(dataset)
    for split, nodes in dataset.get_idx_split().items():
        mask = torch.zeros(data.num_nodes, dtype=torch.bool).index_fill_(0, nodes, True)
        data["val_mask" if split == "valid" else f"{split}_mask"] = mask
    return data
