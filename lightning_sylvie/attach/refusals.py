"""Layers that can't be right on a cut graph, and what to use instead."""

# ruff: noqa: E501 (one reason, one line)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch_geometric import nn as pyg_nn

HETERO = "it reads a heterogeneous graph, which is not cut; use Data.to_homogeneous() and a layer that reads edge types, such as RGCNConv"
ALL_PAIRS = "it compares every node with every other one; use a layer that reads edges, such as TransformerConv or GATv2Conv"
POOLS = "it merges or drops nodes, so rows no longer belong to the nodes of the plan; use a node-level model"
READOUT = "it reduces over all nodes of the graph; it is only right as the `aggr` of a message-passing layer"
OWN_KERNEL = "its own CSR kernel reads a square graph; use GATConv, SAGEConv or RGCNConv"
SAMPLES = "it samples node pairs of the whole graph inside the model; use a node-level loss"
OVERRIDES = (
    "it overrides `propagate`, where neighbours' rows are read; override `message` and `aggregate`"
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(["HeteroConv", "HGTConv", "HANConv", "HeteroJumpingKnowledge"], HETERO),
    **dict.fromkeys(
        ["GPSConv", "GravNetConv", "DynamicEdgeConv", "XConv", "SGFormer", "Polynormer",
         "SGFormerAttention", "PolynormerAttention", "PerformerAttention", "QFormer"],
        ALL_PAIRS,
    ),
    **dict.fromkeys(
        ["TopKPooling", "SAGPooling", "ASAPooling", "EdgePooling", "ClusterPooling", "PANPooling",
         "MemPooling", "GraphUNet"],
        POOLS,
    ),
    **dict.fromkeys(["CuGraphSAGEConv", "CuGraphGATConv", "CuGraphRGCNConv", "FusedGATConv"], OWN_KERNEL),
    **dict.fromkeys(
        ["GAE", "VGAE", "ARGA", "ARGVA", "SignedGCN", "DeepGraphInfomax", "Node2Vec",
         "MetaPath2Vec", "LightGCN", "LPFormer", "ARLinkPredictor"],
        SAMPLES,
    ),
    "EquilibriumAggregation": "it minimises one energy over all nodes; use DeepSetsAggregation",
    "PatchTransformerAggregation": "it pads to the largest set of the part; use SetTransformerAggregation",
    "MetaLayer": "its models read rows of the whole graph by themselves; write a MessagePassing layer",
    **dict.fromkeys(
        ["AttentiveFP", "NeuralFingerprint", "SchNet", "DimeNet", "DimeNetPlusPlus", "ViSNet", "GNNFF", "GPSE"],
        "it returns one row per graph; use a node-level model",
    ),
    "HypergraphConv": "a hyperedge joins nodes of several parts; expand hyperedges into edges and use GATConv",
    "PANConv": "it multiplies powers of the whole adjacency; use TAGConv or MixHopConv, one exchange per hop",
    "WLConv": "it numbers colours in one table for the whole graph; use WLConvContinuous",
    "MeshCNNConv": "it reads each edge's four neighbours by their place in the whole edge list; use EdgeConv",
    "LINKX": "its first layer has one weight row per node of the whole graph; use MixHopConv or SAGEConv",
    "TGNMemory": "its memory is indexed by the nodes of the whole graph; use a model without memory",
}  # fmt: skip
"""Class name in `torch_geometric.nn` -> why, and what to use instead."""


REFUSED_AT_INPUT: dict[str, str] = {
    "ClusterGCNConv": 'it expects a self loop at every row it holds; use exchange="message"',
}
"""Likewise, only with ``exchange="input"``."""


def refusals(module: torch.nn.Module, *, at_input: bool) -> Iterator[tuple[str, str]]:
    """``(full path and class of a layer, why and what to use instead)`` for every refused layer.

    Args:
        module: The model.
        at_input: Whether halo rows are exchanged at the layers' inputs.
    """
    reasons = REFUSED | (REFUSED_AT_INPUT if at_input else {})
    types = {getattr(pyg_nn, name): why for name, why in reasons.items() if hasattr(pyg_nn, name)}
    inside_layers: set[int] = set()
    for path, layer in module.named_modules():
        why = next((why for kind, why in types.items() if isinstance(layer, kind)), None)
        if isinstance(layer, (pyg_nn.MessagePassing, pyg_nn.HeteroBatchNorm)):
            inside_layers.update(id(part) for part in layer.modules())
        if isinstance(layer, pyg_nn.MessagePassing) and _overrides_propagate(type(layer)):
            why = why or OVERRIDES
        elif isinstance(layer, pyg_nn.Aggregation) and id(layer) not in inside_layers:
            why = why or READOUT
        if why is not None:
            yield f"{path or 'the model'} ({type(layer).__name__})", why


def _overrides_propagate(kind: Any) -> bool:
    """Whether somebody has written a `propagate` for a layer, beside PyG's and its templates."""
    written = [
        owner.__dict__.get("_orig_propagate", owner.__dict__.get("propagate"))
        for owner in kind.__mro__[: kind.__mro__.index(pyg_nn.MessagePassing)]
    ]
    generated = {owner.__dict__.get("_jinja_propagate") for owner in kind.__mro__}
    library = pyg_nn.MessagePassing.propagate
    return any(p is not None and p is not library and p not in generated for p in written)
