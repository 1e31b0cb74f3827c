"""SylvieStrategy: a single-device script on ranks is the same computation.

Every case is run by an ordinary single-device Trainer and by 1, 2 and 4 ranks; see `trainers`.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningNodeData
from torch_geometric.nn import GraphSAGE
from trainers import (
    NUM_CLASSES,
    NUM_FEATURES,
    OnRanks,
    Setting,
    UserModule,
    alone,
    assert_equal_runs,
    loader,
    small_gnn,
    small_graph,
    weights,
)

from lightning_sylvie import GraphDataModule, SylvieModule

RANKS = (1, 2, 4)


def fit(
    setting: Setting, module: Any = None, train: Any = None, val: Any = None, **options: Any
) -> dict[str, Tensor]:
    """Weights after ten epochs; of a user's module with validation, unless told otherwise."""
    if train is None:
        train, val = loader(), loader()
    module = UserModule() if module is None else module
    setting.trainer(**options).fit(module, train, val)
    return weights(module)


# Loaders


def pyg_loader(setting: Setting) -> Any:
    return fit(setting)


class OwnLoaders(UserModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return [loader(), loader()]

    def validation_step(self, data: Data, batch: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(data, data.val_mask))


def loaders_of_the_module(setting: Setting) -> Any:
    module = OwnLoaders()
    setting.trainer().fit(module)
    return weights(module)


class Training(UserModule):
    validation_step = None  # type: ignore[assignment]


def collated_loader(setting: Setting) -> Any:
    data = TorchLoader([small_graph()], batch_size=1, collate_fn=lambda graphs: graphs[0])
    return fit(setting, Training(), data)


def unbatched_loader(setting: Setting) -> Any:
    return fit(setting, Training(), TorchLoader([small_graph()], batch_size=None))


def node_data_of_pyg(setting: Setting) -> Any:
    data = small_graph()
    return fit(setting, UserModule(), LightningNodeData(data, loader="full"))


def sylvie_module(setting: Setting) -> Any:
    return fit(setting, SylvieModule(small_gnn()), GraphDataModule(small_graph()))


def exchange_at_the_input(setting: Setting) -> Any:
    return fit(setting, strategy={"exchange": "input", "debug": True})


LOADERS = [
    exchange_at_the_input,
    pyg_loader,
    loaders_of_the_module,
    collated_loader,
    unbatched_loader,
    node_data_of_pyg,
    sylvie_module,
]


# What a loss may be


def unlabelled_part(graph: Data, num_ranks: int) -> Tensor:
    """An assignment without training nodes on rank 0."""
    if num_ranks < 2:
        return torch.zeros(graph.num_nodes, dtype=torch.int64)
    parts = torch.arange(graph.num_nodes) % num_ranks
    parts[graph.train_mask & (parts == 0)] = 1
    return parts


def rank_without_training_nodes(setting: Setting) -> Any:
    partition = unlabelled_part(small_graph(), setting.num_ranks)
    return fit(setting, strategy={"partition": partition})


class MaskedSum(Training):
    """The loss as a product with the mask: on a part without training nodes it is 0 / 0."""

    def loss(self, data: Data, mask: Tensor) -> Tensor:
        losses = F.cross_entropy(self.gnn(data.x, data.edge_index), data.y, reduction="none")
        return (losses * mask).sum() / mask.sum()


def zero_by_zero_on_a_rank(setting: Setting) -> Any:
    partition = unlabelled_part(small_graph(), setting.num_ranks)
    return fit(setting, MaskedSum(), loader(), strategy={"partition": partition})


class Summed(Training):
    def loss(self, data: Data, mask: Tensor) -> Tensor:
        out = self.gnn(data.x, data.edge_index)
        return F.cross_entropy(out[mask], data.y[mask], reduction="sum")


def summed_loss(setting: Setting) -> Any:
    return fit(setting, Summed(), loader(), strategy={"loss_reduction": "sum"})


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


class Weighted(Training):
    def loss(self, data: Data, mask: Tensor) -> Tensor:
        out = self.gnn(data.x, data.edge_index)
        return F.cross_entropy(out[mask], data.y[mask], weight=CLASS_WEIGHTS)


def sum_of_weights(data: Data) -> Tensor:
    return CLASS_WEIGHTS[data.y[data.train_mask]].sum()


def weighted_loss(setting: Setting) -> Any:
    return fit(setting, Weighted(), loader(), strategy={"loss_reduction": sum_of_weights})


class Dict(Training):
    def training_step(self, data: Data, _: int) -> Any:
        return {"loss": self.loss(data, data.train_mask), "note": 1}


def loss_in_a_dict(setting: Setting) -> Any:
    return fit(setting, Dict(), loader())


class Regularised(Training):
    def loss(self, data: Data, mask: Tensor) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        return super().loss(data, mask) + 1e-2 * penalty


def regularised_loss(setting: Setting) -> Any:
    return fit(setting, Regularised(), loader())


LOSSES = [
    rank_without_training_nodes,
    zero_by_zero_on_a_rank,
    summed_loss,
    weighted_loss,
    loss_in_a_dict,
    regularised_loss,
]


# Optimisation


def clip_by_norm(setting: Setting) -> Any:
    return fit(setting, gradient_clip_val=0.05)


def clip_by_value(setting: Setting) -> Any:
    return fit(setting, gradient_clip_val=0.003, gradient_clip_algorithm="value")


class Cosine(UserModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def cosine_schedule(setting: Setting) -> Any:
    return fit(setting, Cosine())


class Plateau(UserModule):
    """Lowers its learning rate when `val_loss`, logged without sync_dist, stops to improve."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=3.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }

    def on_train_end(self) -> None:
        lr = self.optimizers().param_groups[0]["lr"]
        self.register_buffer("last_lr", torch.tensor(lr, dtype=torch.float64))


def plateau_schedule(setting: Setting) -> Any:
    found = fit(setting, Plateau())
    assert found["last_lr"] < 3.0
    return found


class Lbfgs(Training):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), line_search_fn="strong_wolfe", max_iter=5)


def lbfgs_with_line_search(setting: Setting) -> Any:
    return fit(setting, Lbfgs(), loader(), max_epochs=4)


class Manual(UserModule):
    """Two backwards into the same gradients, clipped, with a step by hand."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, data: Data, _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(data, data.train_mask))
        self.manual_backward(0.5 * self.loss(data, data.train_mask))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


def manual_optimisation(setting: Setting) -> Any:
    return fit(setting, Manual())


class TwoOptimizers(Manual):
    def training_step(self, data: Data, _: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(data, data.train_mask))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first, *others = self.gnn.convs
        rest = [p for conv in others for p in conv.parameters()]
        return torch.optim.Adam(first.parameters(), 0.02), torch.optim.SGD(rest, 0.1)


def two_optimizers(setting: Setting) -> Any:
    return fit(setting, TwoOptimizers())


class PartlyUsed(UserModule):
    """`never` has no gradient at all; `sometimes` is used on the rank of one node only."""

    def __init__(self) -> None:
        super().__init__()
        self.never = torch.nn.Parameter(torch.ones(3))
        self.sometimes = torch.nn.Parameter(torch.ones(NUM_CLASSES))

    def loss(self, data: Data, mask: Tensor) -> Tensor:
        out = self.gnn(data.x, data.edge_index)
        number = data.get("n_id", torch.arange(len(mask)))
        chosen = mask & (number == small_graph().train_mask.nonzero()[0])
        if chosen.any():
            out = out + chosen[:, None] * self.sometimes
        return F.cross_entropy(out[mask], data.y[mask])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.never.grad is None
        assert self.sometimes.grad is not None


def unused_parameters(setting: Setting) -> Any:
    return fit(setting, PartlyUsed())


OPTIMISATION = [
    clip_by_norm,
    clip_by_value,
    cosine_schedule,
    plateau_schedule,
    lbfgs_with_line_search,
    manual_optimisation,
    two_optimizers,
    unused_parameters,
]


# Callbacks and flow


def moving_average(setting: Setting) -> Any:
    average = EMAWeightAveraging(decay=0.8, update_every_n_steps=2)
    return fit(setting, UserModule(small_gnn(norm="batch_norm")), callbacks=[average])


def stochastic_average(setting: Setting) -> Any:
    average = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=4)
    return fit(setting, callbacks=[average])


def batch_norm_and_skips(setting: Setting) -> Any:
    return fit(setting, UserModule(small_gnn(norm="batch_norm", jk="cat")))


def limited_batches(setting: Setting) -> Any:
    return fit(setting, limit_train_batches=1, limit_val_batches=1, num_sanity_val_steps=2)


def without_validation(setting: Setting) -> Any:
    return fit(setting, limit_val_batches=0)


def several_fits(setting: Setting) -> Any:
    """validate, whose tensors are inference tensors, then fit, fit on, and a new module."""
    trainer, module = setting.trainer(max_epochs=3), UserModule()
    trainer.validate(module, loader(), verbose=False)
    trainer.fit(module, loader(), loader())
    trainer.fit_loop.max_epochs = 6
    trainer.fit(module, loader(), loader())
    trainer.validate(module, loader(), verbose=False)
    trainer.fit_loop.max_epochs = 9
    other = UserModule(small_gnn(seed=1))
    trainer.fit(other, loader(), loader())
    return weights(module) | {f"other.{name}": w for name, w in weights(other).items()}


FLOW = [
    moving_average,
    stochastic_average,
    batch_norm_and_skips,
    limited_batches,
    without_validation,
    several_fits,
]

# Precision, where rounding decides: equal to the precision's own error


def in_bfloat16(setting: Setting) -> Any:
    graph = small_graph(torch.bfloat16 if not setting.num_ranks else torch.float32)
    return fit(setting, UserModule(), loader(graph), loader(graph), precision="bf16-true")


def in_float32(setting: Setting) -> Any:
    graph = small_graph(torch.float32)
    return fit(setting, UserModule(), loader(graph), loader(graph), precision="32-true")


def in_mixed_precision(setting: Setting) -> Any:
    graph = small_graph(torch.float32)
    return fit(setting, UserModule(), loader(graph), loader(graph), precision="bf16-mixed")


ROUNDED = {in_float32: 1e-4, in_mixed_precision: 0.05, in_bfloat16: 0.1}


# Seeds


class Dropping(UserModule):
    def __init__(self) -> None:
        super().__init__(GraphSAGE(NUM_FEATURES, 8, 2, NUM_CLASSES, dropout=0.5))
        self.masks: list[Tensor] = []

    def on_train_start(self) -> None:
        self.start = weights(self)

    def training_step(self, data: Data, _: int) -> Any:
        self.masks.append(F.dropout(torch.ones(64)))
        return super().training_step(data, _)


def seeded_differently(setting: Setting) -> Any:
    """Weights at the start, and the masks of two fits; ranks built different models."""
    torch.manual_seed(setting.rank)
    module, trainer = Dropping(), setting.trainer(max_epochs=2)
    trainer.validate(module, loader(), verbose=False)
    trainer.fit(module, loader(), loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(), loader())
    return module.start, module.masks


def seeded_by_lightning(setting: Setting) -> Any:
    found = []
    for _ in range(2):
        seed_everything(3, verbose=False)
        module, trainer = Dropping(), setting.trainer(max_epochs=2)
        trainer.fit(module, loader(), loader())
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, loader(), loader())
        found.append((weights(module), module.masks))
    return found


# Collectives


class Counting(UserModule):
    """Counts calls of torch.distributed and of the strategy's transports in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[Counter[str]] = []

    def on_train_epoch_start(self) -> None:
        strategy = self.trainer.strategy
        halo, sums = strategy.halo_transport, strategy.gradient_transport
        now = Counter(CALLS, exchanges=halo.num_exchanges, own_sums=sums.num_all_reduces)
        now["halo_sums"] = halo.num_all_reduces
        self.epochs.append(now)


CALLS: Counter[str] = Counter()
NAMES = ("broadcast", "all_reduce", "all_gather", "barrier", "all_to_all_single", "reduce")


def count_calls() -> None:
    for name in (*NAMES, "gather", "scatter", "all_gather_into_tensor", "broadcast_object_list"):
        setattr(dist, name, _counted(name, getattr(dist, name)))


def _counted(name: str, call: Any) -> Any:
    @functools.wraps(call)
    def counted(*args: Any, **options: Any) -> Any:
        CALLS[name] += 1
        return call(*args, **options)

    return counted


def epochs_of(setting: Setting, module: Counting, **options: Any) -> list[dict[str, int]]:
    """What each epoch but the first two adds; in those, names of values are agreed."""
    setting.trainer(max_epochs=6, **options).fit(module, loader(), loader())
    pairs = zip(module.epochs[2:], module.epochs[3:], strict=False)
    return [dict(after - before) for before, after in pairs]


def collectives(setting: Setting) -> Any:
    count_calls()
    return epochs_of(setting, Counting(), limit_val_batches=0), epochs_of(setting, Counting())


on_ranks = OnRanks(
    *LOADERS,
    *LOSSES,
    *OPTIMISATION,
    *FLOW,
    *ROUNDED,
    seeded_differently,
    seeded_by_lightning,
    collectives,
)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("case", [*LOADERS, *LOSSES, *OPTIMISATION, *FLOW])
def test_training_is_that_of_one_device(case: Any, num_ranks: int) -> None:
    # Adam turns the gradient of a bias before BatchNorm, which is rounding alone, into steps.
    loose = case in (lbfgs_with_line_search, batch_norm_and_skips)
    assert_equal_runs(on_ranks(case, num_ranks), alone(case), 1e-7 if loose else 1e-10)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("case", ROUNDED)
def test_other_precisions_differ_by_their_rounding(case: Any, num_ranks: int) -> None:
    assert_equal_runs(on_ranks(case, num_ranks), alone(case), ROUNDED[case])


def test_validation_leaves_training_bit_equal() -> None:
    for with_it, without in zip(
        on_ranks(pyg_loader, 2), on_ranks(without_validation, 2), strict=True
    ):
        for name, value in with_it.items():
            assert torch.equal(value, without[name]), name


def test_ranks_start_with_equal_weights_and_draw_other_dropout_masks() -> None:
    """Whatever they were seeded with; also in a second fit, before which Lightning seeds again."""
    (start, masks), (other_start, other_masks) = on_ranks(seeded_differently, 2)
    assert_equal_runs([other_start], start, 0.0)
    assert len(masks) == 3
    for mask, other in zip(masks, other_masks, strict=True):
        assert not torch.equal(mask, other)


def test_a_seed_makes_a_run_reproducible() -> None:
    by_rank = on_ranks(seeded_by_lightning, 2)
    for (first, masks), (again, masks_again) in by_rank:
        assert_equal_runs([again], first, 0.0)
        assert all(map(torch.equal, masks, masks_again))
    for mask, other in zip(by_rank[0][0][1], by_rank[1][0][1], strict=True):
        assert not torch.equal(mask, other)


def test_collectives_of_an_epoch() -> None:
    """One sum of gradients, one of logged values, Lightning's broadcast, and the halo exchanges.

    Of three layers the first reads input features, whose halo rows came in the first epoch; the
    others exchange forward and backward.
    """
    for training, with_validation in on_ranks(collectives, 2):
        expected = {"broadcast": 1, "own_sums": 2, "exchanges": 4}
        assert training == [expected] * 3
        expected = {"broadcast": 1, "own_sums": 3, "exchanges": 6}
        assert with_validation == [expected] * 3
