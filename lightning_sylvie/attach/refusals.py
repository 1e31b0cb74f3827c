"""Layers that can't be right on a cut graph, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch_geometric import nn as pyg_nn

HETERO = "it reads a heterogeneous graph, which is not cut; use RGCNConv or HGT-free layers on one edge set with edge types"
ALL_PAIRS = "it compares every node with every other one; use a layer that reads edges, such as TransformerConv or GATv2Conv"
POOLS = "it merges or drops nodes, so rows no longer belong to the nodes of the plan; use a node-level model"
READOUT = "it reduces over all nodes of the graph; it is only right as the `aggr` of a message-passing layer"
OWN_KERNEL = "its own CSR kernel reads a square graph; use GATConv, SAGEConv or RGCNConv"
SAMPLES = "it samples node pairs of the whole graph inside the model; use a node-level loss"


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
    "HypergraphConv": "a hyperedge joins nodes of several parts; expand hyperedges into edges and use GATConv",
    "PANConv": "it multiplies powers of the whole adjacency; use TAGConv or MixHopConv, one exchange per hop",
    "WLConv": "it numbers colours in one table for the whole graph; use WLConvContinuous",
    "MeshCNNConv": "it reads each edge's four neighbours by their place in the whole edge list; use EdgeConv",
    "LINKX": "its first layer has one weight row per node of the whole graph; use MixHopConv or SAGEConv",
    "TGNMemory": "its memory is indexed by the nodes of the whole graph; use a model without memory",
}  # fmt: skip
"""Class name in `torch_geometric.nn` -> why, and what to use instead."""


def refusals(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """``(full path and class of a layer, why and what to use instead)`` for every refused layer."""
    types = {getattr(pyg_nn, name): why for name, why in REFUSED.items() if hasattr(pyg_nn, name)}
    inside_layers: set[int] = set()
    for path, layer in module.named_modules():
        why = next((why for kind, why in types.items() if isinstance(layer, kind)), None)
        if isinstance(layer, pyg_nn.MessagePassing):
            inside_layers.update(id(part) for part in layer.modules())
            why = why or _overridden(layer)
        elif isinstance(layer, pyg_nn.Aggregation) and id(layer) not in inside_layers:
            why = why or READOUT
        if why is not None:
            yield f"{path or 'the model'} ({type(layer).__name__})", why


def _overridden(layer: Any) -> str | None:
    """Why a layer with a `propagate` of its own can't be followed."""
    written = layer.inspector.implements("propagate") if hasattr(layer, "inspector") else False
    own = getattr(type(layer), "_orig_propagate", type(layer).propagate)
    if written and own is not pyg_nn.MessagePassing.propagate:
        return "it overrides `propagate`, where neighbours' rows are read; override `message` and `aggregate`"
    return None
