"""The data module: one graph, in any of the forms that people have it in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import BaseData

from lightning_sylvie.named import named_graph
from lightning_sylvie.partition import Partitioner, resolve
from lightning_sylvie.strategy import SylvieStrategy

Source: TypeAlias = Data | Sequence[Data] | Callable[[], Any] | str | Path
SPLITS = ("train_mask", "val_mask", "test_mask")


class GraphLoader:
    """A loader of one batch, the whole graph, made when it is asked for.

    On `SylvieStrategy` only rank 0 asks; on any other strategy it is what the model trains on.

    Args:
        make: Gives the graph.
        partition: Overrides the strategy's.
        cache_dir: Overrides the strategy's.
        folder: Parts made ahead; then nothing is cut.
    """

    def __init__(
        self,
        make: Callable[[], Data],
        *,
        partition: Partitioner | None = None,
        cache_dir: str | Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.make, self.partition, self.cache_dir, self.folder = make, partition, cache_dir, folder

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Data]:
        yield self.make()


class GraphDataModule(LightningDataModule):
    """One graph for training, validation, test and prediction.

    Args:
        data: A `Data`; a dataset of one graph; a function that makes either, which runs only where
            the graph is cut; a file with a saved `Data`; a folder of parts; or the name of a
            dataset, see `named_graph`.
        partition: As in `SylvieStrategy`, which decides when this is None.
        cache_dir: Likewise.
        inductive: Train on the subgraph of the training nodes, evaluate on the whole graph.
        split: Training and validation share of a random split, for a graph without masks; or, for
            masks that hold several splits, the number of the split to use.
        seed: Of the random split.

    Raises:
        ValueError: For options outside of the above.
    """

    def __init__(
        self,
        data: Source,
        *,
        partition: str | Tensor | Partitioner | None = None,
        cache_dir: str | Path | None = None,
        inductive: bool = False,
        split: tuple[float, float] | int = (0.6, 0.2),
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(split, int) and not (0 < min(split) and sum(split) < 1):
            raise ValueError(
                "expected a training and a validation share above 0 and below 1 together, got "
                f"{split}"
            )
        self._source, self._data = data, None
        self._partition = None if partition is None else resolve(partition)
        self._cache_dir, self._inductive = cache_dir, inductive
        self._split, self._seed = split, seed
        self._folder = _parts_folder(data)
        if self._folder and inductive:
            raise ValueError("inductive=True needs the graph itself, got a folder of parts")

    def setup(self, stage: str) -> None:
        """Refuses other strategies on several devices, each of which would train on all of it."""
        trainer = self.trainer
        if (
            trainer is not None
            and trainer.world_size > 1
            and not isinstance(trainer.strategy, SylvieStrategy)
        ):
            raise ValueError(
                f"expected SylvieStrategy for {trainer.world_size} devices, got "
                f"{type(trainer.strategy).__name__}, which does not cut a graph: "
                "Trainer(strategy=SylvieStrategy())"
            )

    def train_dataloader(self) -> GraphLoader:
        return self._loader(self._training_graph if self._inductive else self._graph)

    def val_dataloader(self) -> GraphLoader:
        return self._loader(self._graph)

    def test_dataloader(self) -> GraphLoader:
        return self._loader(self._graph)

    def predict_dataloader(self) -> GraphLoader:
        return self._loader(self._graph)

    def _loader(self, make: Callable[[], Data]) -> GraphLoader:
        return GraphLoader(
            make, partition=self._partition, cache_dir=self._cache_dir, folder=self._folder
        )

    def _graph(self) -> Data:
        """The graph with one mask per split, loaded once."""
        if self._folder:
            raise ValueError(
                f"expected SylvieStrategy for a folder of parts, got {self._folder}: on one device "
                "pass the graph itself"
            )
        if self._data is None:
            self._data = _with_masks(_load(self._source), self._split, self._seed)
        return self._data

    def _training_graph(self) -> Data:
        data = self._graph()
        subgraph = data.subgraph(data.train_mask)
        subgraph["n_id"] = data.train_mask.nonzero().view(-1)
        return subgraph


def _parts_folder(source: Source) -> Path | None:
    path = Path(source) if isinstance(source, (str, Path)) else None
    return path if path is not None and path.is_dir() else None


def _load(source: Any) -> Data:
    if isinstance(source, (str, Path)):
        file = Path(source).is_file()
        source = torch.load(source, weights_only=False) if file else named_graph(str(source))
    elif callable(source) and not isinstance(source, BaseData):
        source = source()
    if not isinstance(source, BaseData) and hasattr(source, "__getitem__"):
        if len(source) != 1:
            raise ValueError(f"expected a dataset of one graph, got {len(source)}: pass dataset[i]")
        source = source[0]
    if not isinstance(source, Data):
        raise ValueError(
            f"expected a torch_geometric Data or something that gives one, got "
            f"{type(source).__name__}"
        )
    return source


def _with_masks(data: Data, split: tuple[float, float] | int, seed: int) -> Data:
    """A copy of `data` with a 1-D train, validation and test mask."""
    data = copy.copy(data)
    if all(data.get(name) is None for name in SPLITS):
        if isinstance(split, int):
            raise ValueError(f"expected data with masks for split={split}, got none")
        return _random_split(data, split, seed)
    for name in SPLITS:
        mask = data.get(name)
        if mask is not None and mask.dim() == 2:
            column = split if isinstance(split, int) else 0
            if not 0 <= column < mask.shape[1]:
                raise ValueError(f"expected split below {mask.shape[1]}, got {split}")
            data[name] = mask[:, column].contiguous()
    return data


def _random_split(data: Data, split: tuple[float, float], seed: int) -> Data:
    num_nodes = int(data.num_nodes or 0)
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    ends = [round(split[0] * num_nodes), round(sum(split) * num_nodes)]
    for name, nodes in zip(SPLITS, order.tensor_split(ends), strict=True):
        data[name] = torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, nodes, True)
    return data
