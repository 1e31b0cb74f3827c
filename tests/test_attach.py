"""What attaching does to a model, and what it does not: identity, copies, refusals, own layers."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg_nn
from catalogue import entries, make_graph
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.utils import add_self_loops, degree

from lightning_sylvie.attach import REFUSED, Attachment, Exchange, RefusedLayerError
from lightning_sylvie.exchange import Halo
from lightning_sylvie.shard import Shard, cut
from lightning_sylvie.transport import Loopback, Transport, connect
from lightning_sylvie.transport.threads import run_threads

GRAPH = make_graph(directed=True)
X, EDGES = GRAPH.node["x"], GRAPH.edge_index


def alone(*, reverse: bool = True) -> tuple[Halo, Shard]:
    """The exchange of one rank, and the whole graph as its part."""
    assignment = torch.zeros(GRAPH.num_nodes, dtype=torch.int64)
    return Halo(Loopback()), cut(GRAPH, assignment, 1, reverse=reverse)[0]


def in_parts() -> tuple[Halo, Shard]:
    """This rank's end of the exchange, and its part: every second, third … node."""
    limit = timedelta(seconds=30)
    assignment = torch.arange(GRAPH.num_nodes) % dist.get_world_size()
    shard = cut(GRAPH, assignment, dist.get_world_size(), reverse=True)[dist.get_rank()]
    return Halo(connect(dist.new_group(timeout=limit), timeout=limit)), shard


def check_equal(
    module: torch.nn.Module, exchange: Exchange = "message", **edge: str
) -> tuple[Attachment, Halo, Shard]:
    """Attached in parts, the module gives what it gives on the whole graph, with its gradients."""
    halo, shard = in_parts()
    module = module.double()
    plain = copy.deepcopy(module)
    attachment = Attachment(module, halo, exchange=exchange)
    attachment.keep(shard)
    whole, own = (x.clone().requires_grad_() for x in (X, shard.node["x"]))
    expected = plain(whole, EDGES, **{name: GRAPH.edge[value] for name, value in edge.items()})
    expected.square().sum().backward()
    with halo.using(shard, checking=True):
        given = {name: shard.edge[value] for name, value in edge.items()}
        found = module(own, shard.edge_index, **given)
        found.square().sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(found, expected[shard.node_id], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(own.grad, whole.grad[shard.node_id], rtol=1e-10, atol=1e-12)
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None)
        if parameter.grad is None:
            continue
        halo.transport.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)
    return attachment, halo, shard


def model() -> torch.nn.Module:
    return pyg_nn.Sequential(
        "x, edge_index",
        [
            (pyg_nn.GATConv(8, 6, heads=2), "x, edge_index -> x"),
            pyg_nn.BatchNorm(12),
            torch.nn.ReLU(),
            (pyg_nn.GCNConv(12, 4), "x, edge_index -> x"),
        ],
    ).double()


# Identity


def test_attached_layers_keep_their_names_weights_and_kinds() -> None:
    subject = model()
    before = repr(subject), list(subject.state_dict()), [type(m) for m in subject.modules()]
    attachment = Attachment(subject, alone()[0])
    assert (repr(subject), list(subject.state_dict())) == before[:2]
    assert all(isinstance(m, kind) for m, kind in zip(subject.modules(), before[2], strict=True))
    assert [type(m) for m in subject.modules()] != before[2]
    attachment.detach()
    assert [type(m) for m in subject.modules()] == before[2]


def test_nothing_outside_the_model_changes() -> None:
    function = gcn_conv.gcn_norm
    bystander = pyg_nn.GCNConv(8, 4)
    before = type(bystander), vars(pyg_nn.GCNConv).copy()
    halo, shard = alone()
    subject = pyg_nn.GCNConv(8, 4).double()
    Attachment(subject, halo)
    with halo.using(shard):
        subject(X, EDGES)
    assert gcn_conv.gcn_norm is function
    assert (type(bystander), vars(pyg_nn.GCNConv)) == before


def test_outside_a_step_the_model_is_as_it_was() -> None:
    subject = model().eval()
    expected = subject(X, EDGES)
    Attachment(subject, alone()[0])
    assert torch.equal(subject(X, EDGES), expected)


def test_one_attachment_at_a_time() -> None:
    subject = model()
    halo, shard = alone()
    first = Attachment(subject, halo)
    with pytest.raises(ValueError, match="attached already"):
        Attachment(subject, halo)
    first.detach()
    second = Attachment(subject, halo, exchange="input")
    with halo.using(shard):
        subject(X, EDGES)
    second.detach()
    assert type(subject[0]) is pyg_nn.GATConv
    with pytest.raises(ValueError, match='expected exchange "message" or "input"'):
        Attachment(subject, halo, exchange="layer")  # type: ignore[arg-type]


def test_what_a_layer_remembers_of_another_graph_is_forgotten() -> None:
    subject = pyg_nn.GCNConv(8, 4, cached=True).double()
    expected = subject(X, EDGES)
    halo, shard = alone()
    attachment = Attachment(subject, halo)
    assert subject._cached_edge_index is None
    with halo.using(shard):
        subject(X, EDGES)
    assert subject._cached_edge_index is not None
    attachment.detach()
    assert subject._cached_edge_index is None
    torch.testing.assert_close(subject(X, EDGES), expected)


# Copies


def copies_exchange() -> None:
    halo, shard = in_parts()
    subject = model()
    Attachment(subject, halo)
    twin = copy.deepcopy(subject)
    twin[3].lin.weight.data.mul_(2)
    with torch.no_grad(), halo.using(shard):
        out, other = (m(shard.node["x"], shard.edge_index) for m in (subject, twin))
    torch.testing.assert_close(2 * (out - subject[3].bias), other - twin[3].bias)
    again = copy.deepcopy(twin)
    again[3].lin.weight.data.zero_()
    assert twin[3].lin.weight.abs().sum() > 0


def test_copies_exchange_with_weights_of_their_own() -> None:
    run_ranks(copies_exchange, 2)


def test_a_saved_attached_model_loads_as_the_plain_one() -> None:
    halo, shard = alone()
    subject = pyg_nn.GCN(8, 6, 2, 4, cached=True, norm="batch_norm").double()
    Attachment(subject, halo)
    with halo.using(shard):
        subject(X, EDGES)
    file = io.BytesIO()
    torch.save(subject, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.convs[0]) is pyg_nn.GCNConv
    assert type(loaded.norms[0].module) is torch.nn.BatchNorm1d
    assert loaded.convs[0]._cached_edge_index is None
    torch.testing.assert_close(loaded.eval()(X, EDGES), subject.eval()(X, EDGES))


# Refusals


def bare(name: str) -> torch.nn.Module:
    """An instance of a refused class, without its dependencies."""
    kind = getattr(pyg_nn, name)
    layer: torch.nn.Module = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    return layer


@pytest.mark.parametrize("name", [name for name in REFUSED if hasattr(pyg_nn, name)])
def test_a_refusal_names_the_layer_its_path_and_a_remedy(name: str) -> None:
    subject = torch.nn.Module()
    subject.encoder = torch.nn.ModuleList([torch.nn.Linear(8, 8), bare(name)])
    with pytest.raises(RefusedLayerError) as caught:
        Attachment(subject, alone()[0])
    assert f"encoder.1 ({name}): {REFUSED[name]}" in str(caught.value)
    assert ";" in REFUSED[name]  # the reason; the remedy
    assert type(subject.encoder[1]) is getattr(pyg_nn, name)


def test_every_refused_layer_exists() -> None:
    assert [name for name in REFUSED if not hasattr(pyg_nn, name)] == []


def test_all_refused_layers_are_named_at_once() -> None:
    subject = torch.nn.ModuleDict({"a": bare("GPSConv"), "b": bare("HGTConv")})
    with pytest.raises(RefusedLayerError, match=r"a \(GPSConv\): .*\n  b \(HGTConv\): "):
        Attachment(subject, alone()[0])


def test_a_reduction_over_all_nodes_is_refused_outside_of_layers() -> None:
    subject = torch.nn.ModuleDict({"readout": pyg_nn.MeanAggregation()})
    with pytest.raises(
        RefusedLayerError, match=r"readout \(MeanAggregation\): it reduces over all"
    ):
        Attachment(subject, alone()[0])
    Attachment(pyg_nn.SAGEConv(8, 4, aggr=pyg_nn.MeanAggregation()), alone()[0])


class OwnPropagate(pyg_nn.SAGEConv):
    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        return super().propagate(edge_index, size, **kwargs)


class PlainHeir(pyg_nn.FastRGCNConv):
    pass


def test_a_propagate_of_ones_own_is_refused_and_only_that() -> None:
    with pytest.raises(RefusedLayerError, match=r"the model \(OwnPropagate\): it overrides"):
        Attachment(OwnPropagate(8, 4), alone()[0])
    PlainHeir(8, 4, 3)
    Attachment(PlainHeir(8, 4, 3), alone()[0])
    for entry in entries():
        Attachment(entry.build(), alone()[0]).detach()


def test_layers_that_read_out_edges_say_what_they_miss() -> None:
    subject = torch.nn.ModuleList([pyg_nn.SAGEConv(8, 4, flow="target_to_source").double()])
    halo, shard = alone(reverse=False)
    attachment = Attachment(subject, halo)
    with halo.using(shard), pytest.raises(RefusedLayerError, match=r"0 \(SAGEConv\).*reverse=True"):
        subject[0](X, shard.edge_index)
    attachment.detach()
    halo, shard = alone()
    Attachment(subject, halo)
    with (
        halo.using(shard),
        pytest.raises(RefusedLayerError, match="its edge_index is not a tensor"),
    ):
        subject[0](X, shard.edge_index.clone())


def test_what_only_fails_in_a_step_is_said_there() -> None:
    halo, shard = alone()
    numbers = torch.arange(72)
    layers = torch.nn.ModuleList(
        [pyg_nn.FastRGCNConv(72, 4, 3), pyg_nn.GraphNorm(8), pyg_nn.SAGEConv(8, 4)]
    ).double()
    Attachment(layers, halo)
    with halo.using(shard):
        with pytest.raises(TypeError, match=r"0 \(FastRGCNConv\): .* use RGCNConv"):
            layers[0](numbers, shard.edge_index, shard.edge["edge_type"])
        with pytest.raises(ValueError, match=r"1 \(GraphNorm\): .* leave `batch` out"):
            layers[1](X, numbers // 40)
        adjacency = torch.eye(72, dtype=torch.float64).to_sparse_coo()
        with pytest.raises(TypeError, match=r"2 \(SAGEConv\): expected the part's edge_index"):
            layers[2](X, adjacency)


# Layers written by users


class TutorialConv(pyg_nn.MessagePassing):
    """The GCNConv of PyG's tutorial."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.bias = torch.nn.Parameter(torch.ones(out_channels))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype)
        deg_inv_sqrt = deg.pow(-0.5)
        deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=x, norm=norm) + self.bias  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class OutDegreeConv(TutorialConv):
    """Scales by out-degrees, which a part alone does not know."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        norm = degree(edge_index[0], x.size(0), dtype=x.dtype).clamp(min=1).reciprocal()
        out = self.propagate(edge_index, x=self.lin(x), norm=norm[edge_index[0]])
        return out + self.bias  # type: ignore[no-any-return]


class HalvedGCN(pyg_nn.GCNConv):
    """Overrides `forward` and calls the one above, where the degrees are."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index) / 2  # type: ignore[no-any-return]


def users_layers() -> None:
    halo, shard = in_parts()
    subject = torch.nn.ModuleList([TutorialConv(8, 4).double()])
    Attachment(subject, halo)
    with halo.using(shard), pytest.raises(IndexError, match=r'0 \(Tutorial.*exchange="input"'):
        subject[0](shard.node["x"], shard.edge_index)
    torch.manual_seed(0)
    check_equal(TutorialConv(8, 4), "input")
    check_equal(OutDegreeConv(8, 4), "input")
    check_equal(HalvedGCN(8, 4))
    check_equal(HalvedGCN(8, 4), "input")


def test_users_layers_are_exact_or_name_the_remedy() -> None:
    run_ranks(users_layers, 3)


def learned_weights(exchange: Exchange) -> None:
    halo, shard = in_parts()
    torch.manual_seed(0)
    for conv in (pyg_nn.GCNConv(8, 4), pyg_nn.GraphConv(8, 4), pyg_nn.TAGConv(8, 4, K=2)):
        conv = conv.double()
        plain, weight = copy.deepcopy(conv), GRAPH.edge["edge_weight"].clone().requires_grad_()
        plain(X, EDGES, weight).square().sum().backward()
        own = shard.edge["edge_weight"].clone().requires_grad_()
        Attachment(conv, halo, exchange=exchange).keep(shard)
        with halo.using(shard):
            conv(shard.node["x"], shard.edge_index, own).square().sum().backward()
        assert weight.grad is not None
        torch.testing.assert_close(own.grad, weight.grad[shard.edge_id], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("exchange", ["message", "input"])
def test_gradients_of_edge_weights_reach_through_the_degrees(exchange: Exchange) -> None:
    run_ranks(learned_weights, 2, exchange)


# The fused product


def fused() -> None:
    torch.manual_seed(0)
    for module, edge in (
        (pyg_nn.SAGEConv(8, 4), {}),
        (pyg_nn.SAGEConv(8, 4, aggr="sum"), {}),
        (pyg_nn.GCNConv(8, 4), {}),
        (pyg_nn.GCNConv(8, 4), {"edge_weight": "edge_weight"}),
        (pyg_nn.GINConv(torch.nn.Linear(8, 4), train_eps=True), {}),
        (pyg_nn.GraphConv(8, 4), {"edge_weight": "edge_weight"}),
        (pyg_nn.DirGNNConv(pyg_nn.SAGEConv(8, 4)), {}),
    ):
        attachment, halo, shard = check_equal(module, **edge)
        directions = 2 if isinstance(module, pyg_nn.DirGNNConv) else 1
        assert len(attachment.cache._built) == directions, module
        given = {name: shard.edge[value] for name, value in edge.items()}
        own = shard.node["x"] + 0  # as a row-wise map leaves it, no constant
        with torch.no_grad(), halo.using(shard):
            out = module(own, shard.edge_index, **given)
            attachment.cache.matrix = lambda *_, **__: None  # type: ignore[method-assign]
            scattered = module(own, shard.edge_index, **given)
        torch.testing.assert_close(out, scattered, rtol=1e-12, atol=1e-13)
        assert len(attachment.cache._built) == directions
    attachment, *_ = check_equal(pyg_nn.SAGEConv(8, 4, aggr="max"))
    assert not attachment.cache._built


def test_sums_over_neighbours_are_one_sparse_product() -> None:
    run_ranks(fused, 2)


# Statistics in 16 bits


def low_precision() -> None:
    halo, shard = in_parts()
    norms = (torch.nn.BatchNorm1d(8), pyg_nn.LayerNorm(8), pyg_nn.GraphNorm(8))
    for norm in norms:
        norm = norm.bfloat16()
        expected = copy.deepcopy(norm)(X.bfloat16())[shard.node_id]
        Attachment(norm, halo)
        with halo.using(shard):
            found = norm(shard.node["x"].bfloat16())
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0.02)


def test_norms_count_rows_in_enough_bits() -> None:
    run_ranks(low_precision, 2)


# Order


HASHED = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
sys.path.insert(0, {tests!r})
from torch_geometric.nn import MessagePassing
from lightning_sylvie.attach import Attachment
import test_attach

class ManyNames(MessagePassing):
    def forward(self, x, edge_index):
        named = {{name: x[:, :width] for width, name in enumerate(("p", "b", "zz", "c", "aa"), 1)}}
        return self.propagate(edge_index, **named)
    def message(self, p_j, b_j, zz_j, c_j, aa_j):
        return torch.cat([p_j, b_j, zz_j, c_j, aa_j], dim=1)

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
test_attach.check_equal(ManyNames())
"""


def test_ranks_with_different_hash_seeds_agree(tmp_path: Path) -> None:
    code = HASHED.format(tests=str(Path(__file__).parent))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path / "store")],
            env=os.environ | {"PYTHONHASHSEED": str(7 * rank + 1), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=180)
        assert rank.returncode == 0, errors


class Products(TorchDispatchMode):
    """Counts the multiplications of every product of matrices, dense and sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.num = {"dense": 0, "sparse": 0}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op.overloadpacket.__name__ in ("mm", "addmm", "_sparse_addmm"):
            left, right = args[-2:]
            if left.layout == torch.sparse_csr:
                self.num["sparse"] += left.values().numel() * right.shape[1]
            else:
                self.num["dense"] += left.numel() * right.shape[1]
        return out


@pytest.mark.parametrize("kind", [pyg_nn.GCN, pyg_nn.GraphSAGE, pyg_nn.GIN, pyg_nn.GAT])
def test_ranks_multiply_together_what_one_rank_multiplies(kind: Any) -> None:
    def products(transport: Transport) -> dict[str, int]:
        assignment = torch.arange(GRAPH.num_nodes) % transport.num_ranks
        shard = cut(GRAPH, assignment, transport.num_ranks)[transport.rank]
        halo = Halo(transport, keep_features=False)  # with them here, halo rows are mapped too
        module = kind(X.shape[1], 16, num_layers=3, out_channels=4).double()
        Attachment(module, halo).keep(shard)
        with halo.using(shard), Products() as counted:
            module(shard.node["x"], shard.edge_index).sum().backward()
        return counted.num

    (alone,), parts = run_threads(products, 1), run_threads(products, 4)
    assert alone["dense"] > 0
    assert (alone["sparse"] > 0) == (kind is not pyg_nn.GAT)
    assert {name: sum(part[name] for part in parts) for name in alone} == alone
