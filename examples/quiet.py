"""Imported first: one thread per process, and no messages that say nothing about the example."""

from __future__ import annotations

import logging
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch: one process is one core

for message in (
    ".*torch.jit.* is deprecated",  # torch_geometric, at import
    ".*LeafSpec.* is deprecated",  # lightning, with this torch
    ".*smaller than the logging interval",  # lightning: here an epoch is always one step
    ".*recommended to use .self.log",  # lightning, in one process after several
    ".*You passed in a .val_dataloader. but have no",  # lightning: a benchmark need not validate
    "Sparse CSR tensor support is in beta",  # torch
    "Sparse invariant checks are implicitly disabled",  # torch
):
    warnings.filterwarnings("ignore", message=message)

import lightning  # noqa: E402, F401

for library in ("lightning.pytorch", "lightning.fabric"):  # which set their own level at import
    logging.getLogger(library).setLevel(logging.WARNING)
