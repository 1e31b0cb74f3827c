"""Loads a checkpoint into the plain model where lightning_sylvie can't be imported.

python plain.py CHECKPOINT; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch_geometric.nn import GraphSAGE


class Blocker:
    """Stands in front of every import."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in ("lightning_sylvie", "lightning"):
            raise ImportError(f"{name} is not installed here")


def main() -> None:
    sys.meta_path.insert(0, Blocker())
    assert "lightning_sylvie" not in sys.modules
    checkpoint = torch.load(sys.argv[1], weights_only=True)
    model = GraphSAGE(6, 8, num_layers=3, out_channels=4).double()
    state = {name.removeprefix("gnn."): w for name, w in checkpoint["state_dict"].items()}
    model.load_state_dict(state)
    print("RESULT " + json.dumps(sum(float(p.abs().sum()) for p in model.parameters())))


if __name__ == "__main__":
    main()
