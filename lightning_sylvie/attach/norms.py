"""Normalisation layers whose statistics span the whole graph, not one part.

Each class goes in front of a layer's own class and replaces the row statistics by sums over all
ranks, forward and backward, so that every row of the graph counts once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric import nn as pyg_nn
from torch_geometric.utils import degree, scatter

from lightning_sylvie.attach.message_passing import Attached


class GlobalNorm(Attached):
    """Sums over rows that every rank takes part in, also with no rows of its own."""

    def rows(self, x: Tensor) -> Tensor:
        """The rows that count: owned ones, where a layer holds halo rows too."""
        plan = self.attachment.halo.plan
        wide = self.attachment.wide.on_nodes and x.shape[0] == plan.num_rows
        return x[: plan.num_owned] if wide else x

    def mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over the rows of all ranks, ``(1, ...)``, and how many rows those are."""
        rows = self.rows(x)
        total = rows.sum(0, dtype=_accumulated(x)).flatten()
        packed = self.attachment.halo.sum(torch.cat([total, total.new_tensor([rows.shape[0]])]))
        count = packed[-1].detach()
        return (packed[:-1] / count.clamp(min=1)).view(1, *x.shape[1:]), count

    def is_global(self, batch: Tensor | None) -> bool:
        """Whether the rows of all ranks count, which are those of one graph."""
        if not self.attachment.halo.active:
            return False
        if batch is not None and bool(batch.any()):
            raise ValueError(
                f"{self.attachment.path(self)}: expected all nodes in one graph (batch = 0), got "
                f"graph numbers up to {int(batch.max())}; leave `batch` out"
            )
        return True


class GlobalBatchNorm(GlobalNorm):
    """`torch.nn.BatchNorm*` with the statistics of all ranks (also on CPU)."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        if not self.attachment.halo.active or not (layer.training or layer.running_mean is None):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        flat = x.transpose(1, -1).reshape(-1, x.shape[1]) if x.dim() > 2 else x
        flat = flat.to(_accumulated(x))
        mean, count = self.mean(flat)
        variance, _ = self.mean((flat - mean).square())
        if layer.training and count <= 1:
            raise ValueError(f"expected more than 1 row on all ranks together, got {int(count)}")
        if layer.training and layer.track_running_stats:
            self._track(mean.detach()[0], (variance * count / (count - 1)).detach()[0])
        shape = (1, -1) + (1,) * (x.dim() - 2)
        out = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + layer.eps)
        if layer.affine:
            out = out * layer.weight.view(shape) + layer.bias.view(shape)
        return out.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        layer: Any = self
        layer.num_batches_tracked.add_(1)
        momentum = layer.momentum
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
        layer.running_var.lerp_(variance.to(layer.running_var.dtype), momentum)


class GlobalPyGBatchNorm(GlobalNorm):
    """PyG's wrapper: whether there is a single row is a question to all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        if not self.attachment.halo.active or not layer.allow_single_element:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        _, count = self.mean(x.detach()[:, :0])
        if count > 1:
            return layer.module(x)  # type: ignore[no-any-return]
        inner = layer.module
        return torch.nn.functional.batch_norm(
            x,
            inner.running_mean,
            inner.running_var,
            inner.weight,
            inner.bias,
            False,
            0.0,
            inner.eps,
        )


class GlobalInstanceNorm(GlobalNorm):
    """One graph is one instance: mean and variance of each channel over all its rows."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        layer: Any = self
        if (layer.track_running_stats and not layer.training) or not self.is_global(batch):
            return super().forward(x, batch, batch_size)  # type: ignore[misc, no-any-return]
        mean, count = self.mean(x)
        centred = x - mean
        variance, _ = self.mean(centred.square())
        if layer.training and layer.running_mean is not None:
            with torch.no_grad():
                unbiased = variance[0] * count / (count - 1).clamp(min=1)
                layer.running_mean.lerp_(mean[0], layer.momentum)
                layer.running_var.lerp_(unbiased, layer.momentum)
        out = centred / (variance + layer.eps).sqrt()
        scaled: Tensor = out if layer.weight is None else out * layer.weight + layer.bias
        return scaled


class GlobalLayerNorm(GlobalNorm):
    """PyG's ``LayerNorm(mode="graph")``: one mean and one variance for the whole graph."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        layer: Any = self
        if layer.mode != "graph" or not self.is_global(batch):
            return super().forward(x, batch, batch_size)  # type: ignore[misc, no-any-return]
        centred = x - self.mean(x)[0].mean()
        variance = self.mean(centred.square())[0].mean()
        if batch is None:
            out = centred / (variance.sqrt() + layer.eps)
        else:
            out = centred / (variance + layer.eps).sqrt()
        scaled: Tensor = out if layer.weight is None else out * layer.weight + layer.bias
        return scaled


class GlobalPairNorm(GlobalNorm):
    """PairNorm: centring and, unless individual, scaling over all rows of the graph."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        layer: Any = self
        if not self.is_global(batch):
            return super().forward(x, batch, batch_size)  # type: ignore[misc, no-any-return]
        x = x - self.mean(x)[0]
        if layer.scale_individually:
            return layer.scale * x / (layer.eps + x.norm(2, -1, keepdim=True))  # type: ignore[no-any-return]
        energy, _ = self.mean(x.square().sum(-1, keepdim=True))
        return layer.scale * x / (layer.eps + energy).sqrt()  # type: ignore[no-any-return]


class GlobalMeanSubtractionNorm(GlobalNorm):
    """MeanSubtractionNorm over all rows of the graph."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, dim_size: int | None = None
    ) -> Tensor:
        if not self.is_global(batch):
            return super().forward(x, batch, dim_size)  # type: ignore[misc, no-any-return]
        return x - self.mean(x)[0]


class GlobalGraphNorm(GlobalNorm):
    """GraphNorm over all rows of the graph."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        layer: Any = self
        if not self.is_global(batch):
            return super().forward(x, batch, batch_size)  # type: ignore[misc, no-any-return]
        out = x - self.mean(x)[0] * layer.mean_scale
        variance, _ = self.mean(out.square())
        return layer.weight * out / (variance + layer.eps).sqrt() + layer.bias  # type: ignore[no-any-return]


class GlobalGraphSizeNorm(GlobalNorm):
    """GraphSizeNorm by the number of rows of the whole graph."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        if not self.is_global(batch):
            return super().forward(x, batch, batch_size)  # type: ignore[misc, no-any-return]
        _, count = self.mean(x.detach()[:, :0])
        return x * count.pow(-0.5)


class GlobalHeteroBatchNorm(GlobalNorm):
    """HeteroBatchNorm: statistics of each type over all rows of the graph."""

    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        layer: Any = self
        if not self.attachment.halo.active or not (layer.training or not layer.track_running_stats):
            return super().forward(x, type_vec)  # type: ignore[misc, no-any-return]
        count, mean, variance = self._statistics(self.rows(x), self.rows(type_vec))
        if layer.training and layer.track_running_stats:
            factor = layer.momentum
            if factor is None:
                layer.num_batches_tracked.add_(1)
                factor = 1.0 / float(layer.num_batches_tracked)
            seen = count[:, 0] > 0
            with torch.no_grad():
                layer.running_mean[seen] = layer.running_mean[seen].lerp(mean[seen], factor)
                layer.running_var[seen] = layer.running_var[seen].lerp(variance[seen], factor)
        out = (x - mean[type_vec]) / variance.clamp(layer.eps).sqrt()[type_vec]
        if layer.affine:
            out = out * layer.weight[type_vec] + layer.bias[type_vec]
        return out

    @torch.no_grad()
    def _statistics(self, x: Tensor, type_vec: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer: Any = self
        add = functools.partial(
            scatter, index=type_vec, dim=0, dim_size=layer.num_types, reduce="sum"
        )
        count = degree(type_vec, layer.num_types, dtype=x.dtype).view(-1, 1)
        packed = self.attachment.halo.sum(torch.cat([add(x), add(x.square()), count], dim=1))
        total, squares, count = packed.split([x.shape[1], x.shape[1], 1], dim=1)
        mean = total / count.clamp(min=1)
        return count, mean, squares / count.clamp(min=1) - mean.square()


def _accumulated(x: Tensor) -> torch.dtype:
    """The type for sums over rows: 16 bits would not even hold the number of rows."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


NORMS: dict[type, type[GlobalNorm]] = {
    _BatchNorm: GlobalBatchNorm,
    pyg_nn.BatchNorm: GlobalPyGBatchNorm,
    pyg_nn.InstanceNorm: GlobalInstanceNorm,
    pyg_nn.LayerNorm: GlobalLayerNorm,
    pyg_nn.PairNorm: GlobalPairNorm,
    pyg_nn.MeanSubtractionNorm: GlobalMeanSubtractionNorm,
    pyg_nn.GraphNorm: GlobalGraphNorm,
    pyg_nn.GraphSizeNorm: GlobalGraphSizeNorm,
    pyg_nn.HeteroBatchNorm: GlobalHeteroBatchNorm,
}
"""Layers with statistics over rows, and what makes them global."""
