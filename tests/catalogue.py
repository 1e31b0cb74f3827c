"""Every layer the transparency proof runs: how it is built, how it is called, on which graph.

A layer is written as a user would write it, with D input and H output channels, and called with
the names that `inputs` gives to the tensors of a graph or of a part. `REFUSED` of the package says
which layers of `torch_geometric.nn` can't be right on a cut graph; everything else of
`torch_geometric.nn.conv` and `torch_geometric.nn.norm` is here.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor

from lightning_sylvie.graph import Graph

D, H, RELATIONS, EDGE_DIM = 8, 6, 3, 4
EDGE_INPUTS = ("edge_weight", "edge_attr", "edge_type")
NOT_RUN = {"SplineConv": "needs pyg-lib"}
"""Layers whose dependency is not installed where the proof runs."""
ROWS = {
    "Stack": "LGConv, stacked",
    "JumpingStack": "JumpingKnowledge",
    "UserConv": "MessagePassing (a layer of your own)",
    "UserEdgeConv": "MessagePassing (a layer of your own)",
}
"""Class of this file -> the row of the table that it stands for."""


@dataclass(frozen=True)
class Entry:
    """One layer in one variant.

    Args:
        code: The constructor call, as a user writes it.
        call: The arguments of the layer's forward, in names of `inputs`.
        kind: "conv", "norm" or "model".
    """

    code: str
    call: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.code} <- {self.call}"

    @property
    def layer(self) -> str:
        """The row of the table."""
        name = self.code.partition("(")[0]
        return ROWS.get(name, name)

    @property
    def variant(self) -> str:
        """What sets it apart from other entries of the same layer."""
        made = ast.parse(self.code, mode="eval").body
        assert isinstance(made, ast.Call)
        shown = [ast.unparse(a) for a in made.args if not isinstance(a, (ast.Name, ast.Constant))]
        shown += [ast.unparse(keyword) for keyword in made.keywords]
        shown += [part for part in self.call.split(", ") if part in EDGE_INPUTS]
        return ", ".join(shown) or "default"

    def build(self) -> torch.nn.Module:
        """The layer with the same generic float64 weights wherever it is built."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(self.code))
            torch.use_deterministic_algorithms(True)  # what a layer forgets to set becomes NaN
            module: torch.nn.Module = eval(self.code, _NAMES).double()
            torch.use_deterministic_algorithms(False)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.nan_to_num_().add_(torch.rand_like(parameter), alpha=0.2)
        return module

    def __call__(self, module: torch.nn.Module, given: Mapping[str, Any]) -> Tensor:
        out = eval(f"layer({self.call})", {"torch": torch, "layer": module, **given})
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


def mlp(*channels: int, norm: bool = False) -> torch.nn.Sequential:
    """Linear layers with ReLU, and BatchNorm if asked for, between them."""
    layers: list[torch.nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(channels):
        layers += [torch.nn.BatchNorm1d(fan_in)] if norm and layers else []
        layers += [torch.nn.ReLU()] if layers else []
        layers.append(torch.nn.Linear(fan_in, fan_out))
    return torch.nn.Sequential(*layers)


class Stack(torch.nn.Module):
    """LGConv as LightGCN stacks it: the mean over all hops."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(pyg_nn.LGConv() for _ in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hops = [x]
        for conv in self.convs:
            hops.append(conv(hops[-1], edge_index))
        return torch.stack(hops).mean(0)


class JumpingStack(torch.nn.Module):
    """Three SAGEConv under one JumpingKnowledge."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(pyg_nn.SAGEConv(D, D) for _ in range(3))
        self.jump = pyg_nn.JumpingKnowledge(mode, channels=D, num_layers=3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hops = []
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
            hops.append(x)
        return self.jump(hops)  # type: ignore[no-any-return]


class UserConv(pyg_nn.MessagePassing):
    """Written by a user: reads both sides, a plain tensor, and its own update."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(aggr="mean")
        self.lin = torch.nn.Linear(2 * fan_in, fan_out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, scale=x.norm(dim=1, keepdim=True))  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor, scale_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j - x_i], dim=1)) * scale_j  # type: ignore[no-any-return]

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs + x[:, : inputs.shape[1]]


class UserEdgeConv(pyg_nn.MessagePassing):
    """Written by a user: logits in `edge_update`, then a weighted sum."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.lin = torch.nn.Linear(fan_in, fan_out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x)
        alpha = self.edge_updater(edge_index, h=h)
        return self.propagate(edge_index, h=h, alpha=alpha)  # type: ignore[no-any-return]

    def edge_update(self, h_i: Tensor, h_j: Tensor) -> Tensor:
        return (h_i * h_j).sum(dim=-1, keepdim=True).tanh()

    def message(self, h_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha * h_j


_NAMES: dict[str, Any] = {
    name: value
    for name, value in vars(pyg_nn).items()
    if isinstance(value, type) and issubclass(value, torch.nn.Module)
} | {
    "torch": torch,
    "D": D,
    "H": H,
    "RELATIONS": RELATIONS,
    "EDGE_DIM": EDGE_DIM,
    "mlp": mlp,
    "aggr": pyg_nn.aggr,
    "Stack": Stack,
    "JumpingStack": JumpingStack,
    "UserConv": UserConv,
    "UserEdgeConv": UserEdgeConv,
    "histogram": torch.tensor([3, 9, 14, 12, 10, 8, 4, 2, 1]),
}

_CONVS = {
    "x, edge_index": """
        SimpleConv(aggr="mean", combine_root="sum")
        SimpleConv(aggr="max", combine_root="cat")
        SimpleConv(aggr=["sum", "max"], combine_root="self_loop")
        SimpleConv(aggr=aggr.GRUAggregation(D, D))
        SimpleConv(aggr=aggr.AttentionalAggregation(mlp(D, 1)))
        SimpleConv(aggr=aggr.DeepSetsAggregation(mlp(D, D), mlp(D, D)))
        SimpleConv(aggr=aggr.LCMAggregation(D, D))
        SimpleConv(aggr=aggr.SetTransformerAggregation(D))
        SimpleConv(aggr=aggr.MLPAggregation(D, D, 12, num_layers=1))
        SimpleConv(aggr=aggr.VariancePreservingAggregation())
        SimpleConv(aggr=aggr.Set2Set(D, 2))
        SimpleConv(aggr=aggr.QuantileAggregation([0.3, 0.6]))
        SimpleConv(aggr=aggr.SortAggregation(3))
        SimpleConv(aggr=aggr.GraphMultisetTransformer(D, 2))
        SimpleConv(aggr="mul")
        GCNConv(D, H)
        GCNConv(D, H, improved=True)
        GCNConv(D, H, add_self_loops=False)
        GCNConv(D, H, normalize=False)
        GCNConv(D, H, cached=True)
        GCNConv(D, H, aggr="max")
        GCNConv(D, H, decomposed_layers=2)
        GCNConv(D, H, flow="target_to_source")
        ChebConv(D, H, K=1)
        ChebConv(D, H, K=3)
        ChebConv(D, H, K=2, normalization="rw")
        ChebConv(D, H, K=2, normalization=None)
        SAGEConv(D, H)
        SAGEConv(D, H, aggr="max")
        SAGEConv(D, H, aggr="median")
        SAGEConv(D, H, aggr="softmax", aggr_kwargs={"learn": True})
        SAGEConv(D, H, aggr="powermean", project=True, aggr_kwargs={"learn": True})
        SAGEConv(D, H, aggr="lstm")
        SAGEConv(D, H, aggr=["mean", "max", "std"])
        SAGEConv(D, H, normalize=True, root_weight=False)
        SAGEConv(D, H, flow="target_to_source")
        SAGEConv(D, H, aggr=aggr.DegreeScalerAggregation("mean", "amplification", histogram))
        GraphConv(D, H)
        GatedGraphConv(D, num_layers=1)
        GatedGraphConv(D + 2, num_layers=3)
        ResGatedGraphConv(D, H)
        GATConv(D, H, heads=2)
        GATConv(D, H, heads=2, concat=False, add_self_loops=False)
        GATConv(D, H, residual=True)
        GATConv(D, H, heads=2, flow="target_to_source")
        GATv2Conv(D, H, heads=2)
        GATv2Conv(D, H, heads=2, concat=False, share_weights=True)
        GATv2Conv(D, H, residual=True, add_self_loops=False)
        TransformerConv(D, H, heads=2)
        TransformerConv(D, H, heads=2, concat=False, beta=True)
        AGNNConv()
        TAGConv(D, H, K=3)
        TAGConv(D, H, K=2, normalize=False)
        GINConv(mlp(D, D, H))
        GINConv(mlp(D, D, H, norm=True), train_eps=True)
        ARMAConv(D, H)
        ARMAConv(D, H, num_stacks=2, num_layers=3)
        ARMAConv(D, H, num_stacks=2, num_layers=2, shared_weights=True)
        SGConv(D, H, K=2)
        SGConv(D, H, K=2, add_self_loops=False)
        SSGConv(D, H, alpha=0.2, K=3)
        APPNP(K=3, alpha=0.2)
        MFConv(D, H, max_degree=4)
        EdgeConv(mlp(2 * D, D, H))
        EdgeConv(mlp(2 * D, D, H, norm=True), aggr="mean")
        FeaStConv(D, H, heads=2)
        FeaStConv(D, H, heads=2, add_self_loops=False)
        LEConv(D, H)
        PNAConv(D, H, ["mean", "max", "std"], ["identity", "amplification", "attenuation"],
            histogram)
        PNAConv(D, H, ["sum", "min", "var"], ["linear", "inverse_linear"], histogram, towers=2,
            train_norm=True)
        ClusterGCNConv(D, H, diag_lambda=0.5)
        GENConv(D, H)
        GENConv(D, H, learn_t=True, norm="layer", num_layers=3)
        GENConv(D, D, aggr="powermean", learn_p=True, msg_norm=True, learn_msg_scale=True,
            norm="layer")
        WLConvContinuous()
        FiLMConv(D, H)
        SuperGATConv(D, H, heads=2)
        SuperGATConv(D, H, heads=2, concat=False, attention_type="SD", edge_sample_ratio=0.5)
        EGConv(D, H, num_heads=2, num_bases=3)
        EGConv(D, H, num_heads=2, num_bases=3, add_self_loops=False,
            aggregators=["sum", "mean", "max", "min"])
        EGConv(D, H, num_heads=2, num_bases=3, aggregators=["sum", "std", "var"])
        GeneralConv(D, H)
        GeneralConv(D, H, attention=True, heads=2)
        GeneralConv(D, H, attention=True, heads=2, attention_type="dot_product")
        GeneralConv(D, D, skip_linear=True, directed_msg=False, l2_normalize=True, aggr="max")
        LGConv()
        LGConv(normalize=False)
        AntiSymmetricConv(D)
        AntiSymmetricConv(D, num_iters=3)
        AntiSymmetricConv(D, SAGEConv(D, D), num_iters=2)
        AntiSymmetricConv(D, GATConv(D, D))
        DirGNNConv(SAGEConv(D, H))
        DirGNNConv(GCNConv(D, H), alpha=0.3)
        DirGNNConv(GATConv(D, H), root_weight=False)
        MixHopConv(D, H)
        MixHopConv(D, H, powers=[0, 2, 3], add_self_loops=False)
        UserConv(D, H)
        UserEdgeConv(D, H)
        """,
    "x, edge_index, edge_weight": """
        SimpleConv()
        GCNConv(D, H)
        ChebConv(D, H, K=3)
        ChebConv(D, H, K=3, normalization="rw")
        ChebConv(D, H, K=3, normalization=None)
        GraphConv(D, H)
        GraphConv(D, H, aggr="mean")
        GraphConv(D, H, aggr="max")
        GatedGraphConv(D, num_layers=2)
        TAGConv(D, H, K=3)
        ARMAConv(D, H, num_layers=2)
        SGConv(D, H, K=2)
        SSGConv(D, H, alpha=0.2, K=2)
        APPNP(K=2, alpha=0.1)
        APPNP(K=2, alpha=0.1, add_self_loops=False, cached=True)
        LEConv(D, H)
        WLConvContinuous()
        LGConv()
        AntiSymmetricConv(D, num_iters=2)
        MixHopConv(D, H)
        """,
    "(x, x), edge_index": """
        SAGEConv((D, D), H)
        GATConv((D, D), H, add_self_loops=False)
        GATv2Conv((D, D), H, add_self_loops=False)
        TransformerConv((D, D), H, root_weight=False)
        """,
    "x, edge_index, edge_attr": """
        ResGatedGraphConv(D, H, edge_dim=EDGE_DIM)
        GATConv(D, H, heads=2, edge_dim=EDGE_DIM)
        GATConv(D, H, edge_dim=EDGE_DIM, fill_value=0.5)
        GATv2Conv(D, H, heads=2, edge_dim=EDGE_DIM)
        TransformerConv(D, H, heads=2, edge_dim=EDGE_DIM)
        GINEConv(mlp(D, D, H), edge_dim=EDGE_DIM)
        GMMConv(D, H, dim=EDGE_DIM, kernel_size=3)
        GMMConv(D, H, dim=EDGE_DIM, kernel_size=3, separate_gaussians=True)
        NNConv(D, H, mlp(EDGE_DIM, 5, D * H), aggr="mean")
        CGConv(D, dim=EDGE_DIM)
        CGConv(D, dim=EDGE_DIM, batch_norm=True, aggr="mean")
        PNAConv(D, H, ["mean", "max"], ["identity", "amplification"], histogram, edge_dim=EDGE_DIM)
        GENConv(D, H, edge_dim=EDGE_DIM)
        PDNConv(D, H, edge_dim=EDGE_DIM, hidden_channels=5)
        PDNConv(D, H, edge_dim=EDGE_DIM, hidden_channels=5, add_self_loops=False)
        PDNConv(D, H, edge_dim=EDGE_DIM, hidden_channels=5, normalize=False)
        GeneralConv(D, H, in_edge_channels=EDGE_DIM, attention=True)
        """,
    "x, edge_index, edge_type": """
        RGCNConv(D, H, RELATIONS)
        RGCNConv(D, H, RELATIONS, num_bases=2)
        RGCNConv(D, H, RELATIONS, num_blocks=2, aggr="sum")
        FastRGCNConv(D, H, RELATIONS)
        FastRGCNConv(D, H, RELATIONS, num_bases=2)
        RGATConv(D, H, RELATIONS)
        RGATConv(D, H, RELATIONS, attention_mechanism="within-relation", num_bases=2, heads=2)
        RGATConv(D, H, RELATIONS, attention_mode="multiplicative-self-attention", mod="scaled",
            dim=2)
        RGATConv(D, H, RELATIONS, mod="additive", num_blocks=2, concat=False)
        RGATConv(D, H, RELATIONS, mod="f-additive")
        RGATConv(D, H, RELATIONS, mod="f-scaled")
        FiLMConv(D, H, RELATIONS)
        """,
    "type_id, edge_index, edge_type": """
        RGCNConv(RELATIONS, H, RELATIONS)
        """,
    "x, edge_index, edge_type, edge_attr": """
        RGATConv(D, H, RELATIONS, edge_dim=EDGE_DIM)
        """,
    "x, edge_index, node_type, edge_type, edge_attr": """
        HEATConv(D, H, RELATIONS, RELATIONS, 3, EDGE_DIM, 3, heads=2)
        HEATConv(D, H, RELATIONS, RELATIONS, 3, EDGE_DIM, 3, heads=2, concat=False)
        """,
    "x, edge_index[:, edge_sign], edge_index[:, ~edge_sign]": """
        SignedConv(D, H, first_aggr=True)
        SignedConv(D // 2, H, first_aggr=False)
        """,
    "hops, edge_index, edge_weight": """
        DNAConv(D, heads=2)
        DNAConv(D, heads=4, groups=2, cached=True)
        DNAConv(D, heads=2, normalize=False)
        """,
    "x, pos, edge_index": """
        PointNetConv(mlp(D + 3, D), mlp(D, H))
        PointNetConv(mlp(D + 3, 5, D, norm=True), add_self_loops=False)
        PointTransformerConv(D, H)
        PointTransformerConv(D, H, pos_nn=mlp(3, 4, H), attn_nn=mlp(H, 4, H), add_self_loops=False)
        PointGNNConv(mlp(D, 3), mlp(D + 3, H), mlp(H, D))
        """,
    "x, pos, normal, edge_index": """
        PPFConv(mlp(D + 4, D), mlp(D, H))
        PPFConv(mlp(D + 4, D), add_self_loops=False)
        """,
    "x, x_0, edge_index": """
        GCN2Conv(D, alpha=0.1)
        GCN2Conv(D, alpha=0.1, theta=0.5, layer=2, shared_weights=False)
        FAConv(D)
        FAConv(D, eps=0.3, add_self_loops=False)
        FAConv(D, cached=True)
        """,
    "x, x_0, edge_index, edge_weight": """
        GCN2Conv(D, alpha=0.1)
        FAConv(D, normalize=False)
        """,
}

_NORMS = {
    "x": """
        BatchNorm(D)
        BatchNorm(D, momentum=None, affine=False)
        BatchNorm(D, track_running_stats=False)
        BatchNorm(D, allow_single_element=True)
        InstanceNorm(D)
        InstanceNorm(D, affine=True, track_running_stats=True)
        LayerNorm(D)
        LayerNorm(D, affine=False)
        LayerNorm(D, mode="node")
        GraphNorm(D)
        GraphSizeNorm()
        PairNorm()
        PairNorm(scale_individually=True, scale=2.0)
        MeanSubtractionNorm()
        DiffGroupNorm(D, groups=3)
        torch.nn.BatchNorm1d(D)
        torch.nn.BatchNorm1d(D, momentum=None)
        torch.nn.SyncBatchNorm(D)
        torch.nn.LayerNorm(D)
        torch.nn.GroupNorm(2, D)
        torch.nn.RMSNorm(D)
        """,
    "x, torch.zeros_like(node_type)": """
        InstanceNorm(D)
        LayerNorm(D)
        GraphNorm(D)
        GraphSizeNorm()
        PairNorm()
        MeanSubtractionNorm()
        """,
    "x, node_type": """
        HeteroBatchNorm(D, RELATIONS)
        HeteroBatchNorm(D, RELATIONS, momentum=None, affine=False)
        HeteroLayerNorm(D, RELATIONS)
        """,
    "x, x_0": """
        MessageNorm()
        MessageNorm(learn_scale=True)
        """,
}

_MODELS = {
    "x, edge_index": """
        GCN(D, 10, 3, H)
        GCN(D, 10, 3, H, norm="batch_norm")
        GCN(D, 10, 3, H, jk="cat")
        GCN(D, 10, 3, H, jk="lstm", norm="batch_norm")
        GraphSAGE(D, 10, 3, H)
        GraphSAGE(D, 10, 3, H, norm="batch_norm")
        GraphSAGE(D, 10, 3, H, jk="max")
        GraphSAGE(D, 10, 3, H, jk="cat", norm="batch_norm")
        GAT(D, 10, 3, H, heads=2)
        GAT(D, 10, 3, H, heads=2, norm="batch_norm")
        GAT(D, 10, 3, H, heads=2, jk="cat")
        GAT(D, 10, 3, H, heads=2, jk="last", norm="batch_norm")
        GAT(D, 10, 3, H, v2=True, heads=2)
        GAT(D, 10, 3, H, v2=True, heads=2, norm="batch_norm")
        GAT(D, 10, 3, H, v2=True, heads=2, jk="cat")
        GAT(D, 10, 3, H, v2=True, heads=2, jk="max", norm="batch_norm")
        GIN(D, 10, 3, H)
        GIN(D, 10, 3, H, norm="batch_norm")
        GIN(D, 10, 3, H, jk="cat")
        GIN(D, 10, 3, H, jk="lstm", norm="batch_norm")
        PNA(D, 10, 3, H, aggregators=["mean", "max", "std"],
            scalers=["identity", "attenuation"], deg=histogram)
        PNA(D, 10, 3, H, aggregators=["mean", "min"], scalers=["identity", "linear"],
            deg=histogram, norm="batch_norm")
        PNA(D, 10, 3, H, aggregators=["mean", "max"], scalers=["identity", "attenuation"],
            deg=histogram, jk="max")
        PNA(D, 10, 3, H, aggregators=["sum"], scalers=["attenuation"], deg=histogram, jk="cat",
            norm="batch_norm")
        EdgeCNN(D, 10, 3, H)
        EdgeCNN(D, 10, 3, H, norm="batch_norm")
        EdgeCNN(D, 10, 3, H, jk="cat")
        EdgeCNN(D, 10, 3, H, jk="lstm", norm="batch_norm")
        GraphSAGE(D, 10, 3, H, norm="layer_norm")
        GraphSAGE(D, 10, 3, H, norm="graph_norm")
        GraphSAGE(D, 10, 3, H, norm="pair_norm")
        GCN(D, 10, 3, H, norm="instance_norm")
        JumpingStack("cat")
        JumpingStack("max")
        JumpingStack("lstm")
        Stack(3)
        PMLP(D, 10, H, 3)
        PMLP(D, 10, H, 3, norm=False)
        DeepGCNLayer(GENConv(D, D, norm="layer"), LayerNorm(D), torch.nn.ReLU(), block="res+")
        DeepGCNLayer(GCNConv(D, D), BatchNorm(D), torch.nn.ReLU(), block="res")
        DeepGCNLayer(SAGEConv(D, D), GraphNorm(D), torch.nn.ReLU(), block="dense")
        GroupAddRev(SAGEConv(D // 2, D // 2), num_groups=2)
        """,
    "x": """
        MLP([D, 10, H])
        """,
    "x, edge_index, edge_weight": """
        GCN(D, 10, 3, H)
        RECT_L(D, 10)
        """,
}


def entries() -> list[Entry]:
    """Every layer and variant of the proof."""
    groups = {"conv": _CONVS, "norm": _NORMS, "model": _MODELS}
    return [
        Entry(code, call, kind)
        for kind, calls in groups.items()
        for call, text in calls.items()
        for code in _expressions(text)
    ]


def _expressions(text: str) -> Iterator[str]:
    """One for each line; a line whose brackets are open goes on in the next."""
    code = ""
    for line in text.strip().splitlines():
        code = f"{code} {line.strip()}".strip()
        if code.count("(") == code.count(")"):
            yield code
            code = ""


def make_graph(*, directed: bool, num_nodes: int = 72, seed: int = 0) -> Graph:
    """A small graph with everything that makes a cut hard.

    Edges reach at most 14 numbers far, so parts of consecutive nodes have neighbours only beside
    them. There are self loops, duplicate and one-way edges (unless undirected) and isolated nodes;
    edges are sorted by destination, as order-dependent aggregations need.
    """
    g = torch.Generator().manual_seed(seed)
    source = torch.arange(num_nodes).repeat_interleave(3)
    target = source + torch.randint(1, 15, source.shape, generator=g) * (
        2 * torch.randint(0, 2, source.shape, generator=g) - 1
    )
    inside = (target >= 0) & (target < num_nodes)
    isolated = torch.tensor([5, 23, 40, 41, 70])
    inside &= ~torch.isin(source, isolated) & ~torch.isin(target, isolated)
    pairs = torch.stack([source[inside], target[inside]])
    pairs = torch.cat([pairs, pairs[:, ::17]], dim=1)
    if not directed:
        pairs = torch.cat([pairs, pairs.flip(0)], dim=1)
    loops = torch.tensor([3, 19, 37, 37, 66]).repeat(2, 1)
    first = torch.tensor([[9], [0]])  # PyG's median needs an edge into node 0
    edge_index = torch.cat([pairs, loops, first], dim=1)
    shuffled = edge_index[:, torch.randperm(edge_index.shape[1], generator=g)]
    edge_index = shuffled[:, shuffled[1].argsort(stable=True)]
    return Graph(num_nodes, edge_index, _node(num_nodes, g), _edge(edge_index.shape[1], g))


def _node(num_nodes: int, g: torch.Generator) -> dict[str, Tensor]:
    normal = _randn(g, num_nodes, 3)
    node_type = torch.randint(0, RELATIONS, (num_nodes,), generator=g)
    return {
        "x": _randn(g, num_nodes, D),
        "x_0": _randn(g, num_nodes, D),
        "hops": _randn(g, num_nodes, 3, D),
        "pos": _randn(g, num_nodes, 3),
        "normal": normal / normal.norm(dim=1, keepdim=True),
        "node_type": node_type,
        "type_id": node_type,
        "target": _randn(g, num_nodes, 64),
        "train_mask": torch.rand(num_nodes, generator=g) < 0.5,
    }


def _edge(num_edges: int, g: torch.Generator) -> dict[str, Tensor]:
    return {
        "edge_weight": 0.2 + torch.rand(num_edges, generator=g, dtype=torch.float64),
        "edge_attr": torch.rand(num_edges, EDGE_DIM, generator=g, dtype=torch.float64),
        "edge_type": torch.randint(0, RELATIONS, (num_edges,), generator=g),
        "edge_sign": torch.rand(num_edges, generator=g) < 0.6,
    }


def _randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)
