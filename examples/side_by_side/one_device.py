"""A graph neural network trained on a whole graph at once, as Lightning and PyG teach it."""

import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.transforms import RandomNodeSplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from graphs import community_graph


class Net(L.LightningModule):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.gnn = GraphSAGE(num_features, 64, 3, num_classes, dropout=0.5)

    def training_step(self, data, batch_idx):
        scores = self.gnn(data.x, data.edge_index)
        return F.cross_entropy(scores[data.train_mask], data.y[data.train_mask])

    def test_step(self, data, batch_idx):
        right = self.gnn(data.x, data.edge_index).argmax(-1) == data.y
        self.log("test_acc", right[data.test_mask].float().mean(), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


L.seed_everything(0)
data = RandomNodeSplit(num_val=0.2, num_test=0.2)(community_graph())
loader = DataLoader([data], batch_size=1)
trainer = L.Trainer(
    devices=1,
    accelerator="cpu",
    max_epochs=50,
    logger=False,
    enable_checkpointing=False,
)
model = Net(data.num_features, 8)
trainer.fit(model, loader)
trainer.test(model, loader)
