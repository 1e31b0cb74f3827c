"""Full-graph GNN training across devices, as a PyTorch Lightning strategy."""
