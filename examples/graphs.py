"""Graphs for the examples: one made here, or a dataset by name or file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.io import read_npz

from lightning_sylvie import named
from lightning_sylvie.named import CLASSES, DOWNLOADS

FILES = {"github": "musae_github", "facebook": "musae_facebook"}  # in the layout of read_npz


def community_graph(
    num_nodes: int = 8000,
    num_classes: int = 8,
    num_features: int = 64,
    degree: int = 12,
    homophily: float = 0.45,
    signal: float = 0.13,
    seed: int = 0,
) -> Data:
    """A graph whose classes are communities: edges and weak features both tell the class.

    Neither tells it alone: with the defaults the features of one node give about a quarter of the
    classes right, three layers of GraphSAGE almost nine in ten.

    Args:
        num_nodes: Nodes.
        num_classes: Communities, one class each.
        num_features: Width of the features.
        degree: Mean number of in-edges of a node.
        homophily: Share of edges that stay in a community.
        signal: Length of a class's mean feature beside unit noise, per feature.
        seed: Same seed, same graph.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (num_nodes,), generator=generator)
    means = torch.randn(num_classes, num_features, generator=generator) * signal
    x = means[y] + torch.randn(num_nodes, num_features, generator=generator)

    source = torch.randint(num_nodes, (num_nodes * degree // 2,), generator=generator)
    anywhere = torch.randint(num_nodes, source.shape, generator=generator)
    alike = _member_of(y[source], y, num_classes, generator)
    inside = torch.rand(source.shape, generator=generator) < homophily
    target = torch.where(inside, alike, anywhere)
    return Data(
        x=x,
        edge_index=torch.cat([torch.stack([source, target]), torch.stack([target, source])], 1),
        y=y,
    )


def _member_of(wanted: Tensor, y: Tensor, num_classes: int, generator: torch.Generator) -> Tensor:
    """A random node of each wanted class."""
    members, size = y.argsort(), torch.bincount(y, minlength=num_classes)
    start = size.cumsum(0) - size
    pick = torch.rand(wanted.shape, generator=generator)
    return members[start[wanted] + (pick * size[wanted]).long()]


def named_graph(name: str) -> Data:
    """A node-classification graph of PyG or OGB by name, or a saved `Data` by path.

    Files are looked for in the folder that the environment variable SYLVIE_DATA names, one folder
    per dataset class; what is not there, PyG or OGB downloads into ``data/``.

    Raises:
        ValueError: If no dataset has this name, or it holds several graphs.
    """
    if Path(name).is_file():
        graph: Data = torch.load(name, weights_only=False)
        return graph
    local = Path(os.environ.get("SYLVIE_DATA", DOWNLOADS))
    file = FILES.get(name.lower())
    if file and (path := local / "npz" / f"{file}.npz").exists():
        return read_npz(str(path), to_undirected=True)
    for kind, names in CLASSES.items():
        if name.lower() in map(str.lower, names):
            _link(local / kind, DOWNLOADS / kind, name)
    return named.named_graph(name)


def _link(local: Path, root: Path, name: str) -> None:
    """Links local raw files into PyG's folder for a dataset class: it writes beside them."""
    for folder in local.glob("*"):
        raw = root / folder.name / "raw"
        if folder.name.lower() == name.lower() and not raw.exists():
            raw.parent.mkdir(parents=True, exist_ok=True)
            raw.symlink_to((folder / "raw").resolve())
