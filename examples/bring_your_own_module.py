"""Your own LightningModule on one device, and what changes for several: one line.

    python examples/bring_your_own_module.py               one device, no lightning_sylvie at all
    python examples/bring_your_own_module.py --devices 2   the same with SylvieStrategy

Several machines: docs/several_machines.md.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from graphs import community_graph
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, JumpingKnowledge
from torch_geometric.transforms import RandomNodeSplit

from lightning_sylvie import SylvieStrategy


class Net(L.LightningModule):
    """Two attention layers over the whole graph, written for one device."""

    def __init__(self, num_features: int, num_classes: int, hidden: int = 32) -> None:
        super().__init__()
        self.conv1 = GATv2Conv(num_features, hidden, heads=2, concat=False)
        self.conv2 = GATv2Conv(hidden, hidden, heads=2, concat=False)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.jump = JumpingKnowledge("cat")
        self.head = torch.nn.Linear(2 * hidden, num_classes)

    def forward(self, x, edge_index):
        first = self.norm(self.conv1(x, edge_index)).relu()
        second = self.conv2(F.dropout(first, 0.5, self.training), edge_index).relu()
        return self.head(self.jump([first, second]))

    def training_step(self, data, batch_idx):
        scores = self(data.x, data.edge_index)
        loss = F.cross_entropy(scores[data.train_mask], data.y[data.train_mask])
        self.log("train_loss", loss, prog_bar=True, batch_size=1)
        return loss

    def validation_step(self, data, batch_idx):
        self._log_accuracy(data, "val")

    def test_step(self, data, batch_idx):
        self._log_accuracy(data, "test")

    def predict_step(self, data, batch_idx):
        return self(data.x, data.edge_index).argmax(-1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=5e-4)

    def _log_accuracy(self, data, split):
        right = self(data.x, data.edge_index).argmax(-1) == data.y
        accuracy = right[data[f"{split}_mask"]].float().mean()
        self.log(f"{split}_acc", accuracy, prog_bar=True, batch_size=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--epochs", type=int, default=50)
    options = parser.parse_args()
    several = options.devices * options.nodes > 1

    L.seed_everything(0)
    data = RandomNodeSplit(num_val=0.2, num_test=0.2)(community_graph())
    model = Net(data.num_features, int(data.y.max()) + 1)
    loader = DataLoader([data], batch_size=1)

    trainer = L.Trainer(
        strategy=SylvieStrategy(bits=32, mode="sync") if several else "auto",  # the one line
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.nodes,
        max_epochs=options.epochs,
        check_val_every_n_epoch=10,
        log_every_n_steps=10,
    )
    trainer.fit(model, loader, loader)
    trainer.test(model, loader)
    (predicted,) = trainer.predict(model, loader)  # of all nodes, in their order, on every rank
    if trainer.is_global_zero:
        right = (predicted == data.y)[data.test_mask].float().mean()
        print(f"test accuracy of the gathered predictions: {100 * right:.2f} %")


if __name__ == "__main__":
    main()
