"""Graphs for the examples: one made here, or a dataset by name or file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch_geometric.datasets as datasets
from torch_geometric.data import Data
from torch_geometric.io import read_npz

CLASSES = {
    "Planetoid": ("Cora", "CiteSeer", "PubMed"),
    "Amazon": ("Computers", "Photo"),
    "Coauthor": ("CS", "Physics"),
    "CitationFull": ("Cora_ML", "DBLP"),
    "HeterophilousGraphDataset": ("Tolokers", "Minesweeper"),
}
FILES = {"GitHub": "musae_github", "Facebook": "musae_facebook"}


def community_graph(
    num_nodes: int = 8000,
    num_classes: int = 8,
    num_features: int = 64,
    degree: int = 16,
    homophily: float = 0.6,
    signal: float = 0.25,
    seed: int = 0,
) -> Data:
    """A graph whose classes are communities: edges and weak features both tell the class.

    Args:
        num_nodes: Nodes.
        num_classes: Communities, one class each.
        num_features: Width of the features.
        degree: Mean number of in-edges of a node.
        homophily: Share of edges that stay in a community.
        signal: Length of a class's mean feature beside unit noise.
        seed: Same seed, same graph.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (num_nodes,), generator=generator)
    members = y.argsort()
    start = torch.bincount(y, minlength=num_classes).cumsum(0).roll(1).index_fill_(
        0, torch.tensor([0]), 0
    )
    size = torch.bincount(y, minlength=num_classes)
    num_pairs = num_nodes * degree // 2
    source = torch.randint(num_nodes, (num_pairs,), generator=generator)
    inside = torch.rand(num_pairs, generator=generator) < homophily
    pick = torch.rand(num_pairs, generator=generator)
    within = members[start[y[source]] + (pick * size[y[source]]).long()]
    anywhere = (pick * num_nodes).long()
    target = torch.where(inside, within, anywhere)
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    means = torch.randn(num_classes, num_features, generator=generator) * signal
    x = means[y] + torch.randn(num_nodes, num_features, generator=generator)
    return Data(x=x, edge_index=edge_index, y=y)


def named_graph(name: str) -> Data:
    """A node-classification graph of PyG or OGB by name, or a saved `Data` by path.

    Files are looked for in the folder that SYLVIE_DATA names, one sub-folder per dataset class;
    what is not there, PyG downloads.

    Raises:
        ValueError: If no dataset has this name.
    """
    if Path(name).is_file():
        graph: Data = torch.load(name, weights_only=False)
        return graph
    local = Path(os.environ.get("SYLVIE_DATA", "data"))
    if name in FILES and (local / "npz" / f"{FILES[name]}.npz").exists():
        return read_npz(str(local / "npz" / f"{FILES[name]}.npz"), to_undirected=True)
    for kind, names in CLASSES.items():
        if name in names:
            return getattr(datasets, kind)(str(_root(local, kind, name)), name)[0]
    if name.startswith("ogbn-"):
        return _ogb(name)
    if hasattr(datasets, name):
        return getattr(datasets, name)(f"data/{name}")[0]
    known = sorted([*FILES, *(name for names in CLASSES.values() for name in names)])
    raise ValueError(f"expected a file or a dataset's name, such as {known}, got {name!r}")


def _root(local: Path, kind: str, name: str) -> Path:
    """A folder for PyG's dataset class, with local raw files linked in."""
    root = Path("data") / kind
    folders = local / kind
    found = [f for f in folders.glob("*") if f.name.lower() == name.lower()] if folders.exists() else []
    raw = root / (found[0].name if found else name) / "raw"
    if found and not raw.exists():
        raw.parent.mkdir(parents=True, exist_ok=True)
        raw.symlink_to((found[0] / "raw").resolve())
    return root


def _ogb(name: str) -> Data:
    from ogb.nodeproppred import PygNodePropPredDataset

    dataset = PygNodePropPredDataset(name, "data")
    data = dataset[0]
    for split, nodes in dataset.get_idx_split().items():
        mask = torch.zeros(data.num_nodes, dtype=torch.bool).index_fill_(0, nodes, True)
        data["val_mask" if split == "valid" else f"{split}_mask"] = mask
    return data
