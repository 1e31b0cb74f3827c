"""The Lightning strategy: places the parts, attaches the model, and tears both down."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_sylvie.attach import Exchange, wants_out_edges
from lightning_sylvie.batch import OneBatch, ShardData, shard_in
from lightning_sylvie.exchange import Halo
from lightning_sylvie.gradient import GradientSum
from lightning_sylvie.history import history_of
from lightning_sylvie.lazy import first_loader, initialize, is_lazy
from lightning_sylvie.loss import LossReduction
from lightning_sylvie.options import (
    allow_full_graph_loader,
    check_masks,
    check_strategy,
    check_trainer,
)
from lightning_sylvie.partition import Partitioner, resolve
from lightning_sylvie.placement import Placement
from lightning_sylvie.quantizer import AdaptiveBits, Quantizer, choose
from lightning_sylvie.resume import Resumable
from lightning_sylvie.run import Run
from lightning_sylvie.schedule import Schedule, Unbounded
from lightning_sylvie.shard import Shard
from lightning_sylvie.steplog import ALREADY_GLOBAL
from lightning_sylvie.transport import Transport
from lightning_sylvie.verify import Verification, verify
from lightning_sylvie.world import connect_own, end_all


class SylvieStrategy(Resumable):
    """Trains one graph on all devices: a part per rank, halo rows exchanged in every layer.

    At 32 bits and in sync mode this is the single-device computation: outputs, loss and gradients
    agree to rounding, for every partition (spec: One epoch).

    Args:
        bits: Bits per value on the wire: 0.5, 1, 2, 4, 8, 16 (a cast), or 32, which leaves rows as
            they are; or `AdaptiveBits`, for other bits from row to row. Validation, test and
            prediction always exchange rows as they are.
        mode: ``"sync"``: every layer waits for this epoch's halo rows. ``"async"``: it takes those
            that last epoch's exchange has brought and starts this epoch's, which is under way
            beside the computation; see `BoundedStaleness`.
        smoothing: In ``"async"``: use the exponential mean of what has arrived so far, with this
            momentum (PipeGCN's is 0.95), instead of what arrived last; a pair: of halo rows and of
            their gradients. Synchronous epochs use their own rows as they are.
        quantizer: How rows are coded: ``"rotated"`` (up to 2 bits), ``"minmax"`` (the paper's),
            ``"centroid"``, ``"auto"`` (rotated where it can, else minmax), or a `Quantizer`.
        gradient_bits: Likewise, of the gradients of halo rows; None: `bits`.
        gradient_quantizer: How they are coded; None: as `quantizer`.
        exchange: ``"message"``: halo rows arrive where a layer reads its neighbours; ``"input"``:
            at the layer's input, as the paper draws it.
        partition: ``"metis"``, ``"random"``, ``"streaming"``, int64 ``(num_nodes,)`` with a part
            per node, or a `Partitioner`.
        cache_dir: Where parts are kept between runs; None: the user's cache folder.
        keep_features: Move halo rows of input features that never change once, as they are.
        loss_reduction: What `training_step` returns: the ``"mean"`` over the batch's `train_mask`
            (all its nodes without one), a ``"sum"``, or a weighted mean: a function of the batch
            that gives the sum of its weights.
        all_reduce: How gradients are summed: ``"auto"`` (the backend's own way), another algorithm
            of `GradientSum` by name, or a `GradientSum`.
        debug: Compare every exchange of the first step over the ranks before it starts.
        timeout: How long a rank waits for another before it gives up.
        start_method: How processes are started: ``"popen"`` (the script again), ``"spawn"``,
            ``"fork"`` (notebooks), ``"forkserver"``; ignored where a launcher such as torchrun
            starts them.
        options: What Lightning's own strategies take: accelerator, parallel_devices,
            cluster_environment, checkpoint_io, precision_plugin, process_group_backend.

    Raises:
        ValueError: For a value outside of the above.
    """

    def __init__(
        self,
        *,
        bits: float | AdaptiveBits = 1,
        mode: Literal["sync", "async"] = "sync",
        smoothing: float | tuple[float, float] = 0.0,
        quantizer: str | Quantizer = "auto",
        gradient_bits: float | AdaptiveBits | None = None,
        gradient_quantizer: str | Quantizer | None = None,
        exchange: Exchange = "message",
        partition: str | Tensor | Partitioner = "metis",
        cache_dir: str | Path | None = None,
        keep_features: bool = True,
        loss_reduction: LossReduction = "mean",
        all_reduce: str | GradientSum = "auto",
        debug: bool = False,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.bits, self.mode, self.exchange = bits, mode, exchange
        pair = smoothing if isinstance(smoothing, (tuple, list)) else (smoothing, smoothing)
        self.smoothing: tuple[float, float] = tuple(map(float, pair))  # type: ignore[assignment]
        self.quantizer = choose(bits, quantizer)
        self.gradient_quantizer = choose(gradient_bits or bits, gradient_quantizer or quantizer)
        self.partition, self.cache_dir = resolve(partition), cache_dir
        self.loss_reduction, self.debug, self.keep_features = loss_reduction, debug, keep_features
        self.all_reduce = GradientSum.of(all_reduce)
        self._store: Any = None
        self._placement: Placement | None = None
        self.schedule: Schedule = Unbounded()
        check_strategy(self)

    def __repr__(self) -> str:
        bits = self.bits if isinstance(self.bits, AdaptiveBits) else f"{self.bits:g}"
        return (
            f"SylvieStrategy(bits={bits}, mode={self.mode!r}, exchange={self.exchange!r}, "
            f"partition={self.partition.settings!r})"
        )

    # Life: environment, set-up, tear-down

    def setup_environment(self) -> None:
        super().setup_environment()
        if not self._transports:
            if dist.is_initialized():  # kept: after a failure the reason is looked up there
                self._store = _get_default_store()
            self._transports = connect_own(2, self._timeout or timedelta(minutes=30))
            # Loaders may be read anew while halo rows travel on the other transport.
            self._placement = Placement(self.gradient_transport, self.cache_dir)
        if self.lightning_module is not None:
            allow_full_graph_loader(self.lightning_module.trainer)

    @property
    def halo_transport(self) -> Transport:
        """What halo rows travel on; `gradient_transport` is a group of its own."""
        return self._transports[0]

    @property
    def gradient_transport(self) -> Transport:
        return self._transports[1]

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        check_trainer(trainer, module)
        self._layer_sync = None  # attached norms are global on every device
        seed = self.halo_transport.broadcast_object(torch.initial_seed() % 2**63, 0)
        halo = Halo(
            self.halo_transport,
            self.quantizer,
            self.gradient_quantizer,
            seed=seed,
            keep_features=self.keep_features,
            history=history_of(self.mode, self.root_device, self.schedule, self.smoothing),
        )
        self._run = Run(
            module,
            halo,
            self._transports,
            exchange=self.exchange,
            loss_reduction=self.loss_reduction,
            all_reduce=self.all_reduce,
            debug=self.debug,
        )
        for callback in trainer.callbacks:
            callback.log = self._run.log  # Lightning gave them the module's own before
        if is_lazy(module):
            self._initialize(trainer)
        super().setup(trainer)
        if self.halo_transport.num_ranks > 1:  # equal weights on all ranks, other dropout masks
            drawn = int(torch.randint(2**62, ()))
            torch.manual_seed(drawn + 1_000_003 * self.global_rank)
        self._resume(trainer)

    def _initialize(self, trainer: Any) -> None:
        """One forward on this rank's part, before optimizers take the parameters."""
        assert self.lightning_module is not None
        self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        shard = self._place(first_loader(trainer))
        with self.run.attachment.halo.using(shard):
            initialize(self.lightning_module, ShardData.of(shard))

    def configure_ddp(self) -> None:
        assert self.model is not None
        if dist.is_initialized():
            _sync_module_states(self.model)
        self.run.prepare_gradients()

    @property
    def run(self) -> Run:
        """The model on its part; between set-up and tear-down."""
        if self._run is None:
            raise RuntimeError("expected a call from the Trainer, between setup and teardown")
        return self._run

    def teardown(self) -> None:
        if self._run is not None:
            self._keep_progress()
            self._run.detach()
            self._run = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        if self._run is not None:
            self._run.fail(exception)
        end_all(self._transports, exception)
        super().on_exception(exception)

    # Data

    def process_dataloader(self, dataloader: object) -> object:
        """A loader of this rank's part of the one graph that `dataloader` yields.

        Only rank 0 reads its loader; the graph is cut once per content.
        """
        return OneBatch(ShardData.of(self._place(dataloader)))

    def _place(self, dataloader: object) -> Shard:
        assert self._placement is not None
        assert self.lightning_module is not None
        shard = self._placement.shard(
            dataloader,
            self.partition,
            reverse=wants_out_edges(self.lightning_module.modules()),
            change=self._on_device,
        )
        self.run.attachment.keep(shard)
        check_masks(shard, self.loss_reduction)
        return shard

    def _on_device(self, tensor: Tensor) -> Tensor:
        converted: Tensor = self.precision_plugin.convert_input(tensor.to(self.root_device))
        return converted

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(super().training_step, *args, **kwargs)
        return self.run.train(step, args[0], shard_in(args))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(super().validation_step, *args, **kwargs)
        return self.run.evaluate(step, "validating", shard_in(args))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(super().test_step, *args, **kwargs)
        return self.run.evaluate(step, "testing", shard_in(args))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._placement is not None
        step, shard = partial(super().predict_step, *args, **kwargs), shard_in(args)
        return self._placement.gather(self.run.evaluate(step, "predicting", shard), shard)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Backward, after which gradients are those of the whole graph; see `Run.backward`."""
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        closure_loss = plugin.pre_backward(closure_loss, module)

        def run(loss: Tensor) -> None:
            plugin.backward(loss, module, optimizer, *args, **kwargs)

        self.run.backward(closure_loss, run)
        return plugin.post_backward(closure_loss, module)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if group is ALREADY_GLOBAL:
            return tensor
        return super().reduce(tensor, group, reduce_op)

    def verify(
        self, model: torch.nn.Module, data: Any, *, num_parts: int = 2, tolerance: float = 1e-9
    ) -> Verification:
        """Proves `model` with this strategy's partition and exchange; see `verify.verify`."""
        return verify(
            model,
            data,
            num_parts=num_parts,
            partition=self.partition,
            exchange=self.exchange,
            loss_reduction=self.loss_reduction,
            tolerance=tolerance,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for suffix, method in methods.items():
            if (name := f"sylvie{suffix}") not in strategy_registry:
                description = f"Partition-parallel full-graph training, processes by {method!r}"
                strategy_registry.register(name, cls, description, start_method=method)


SylvieStrategy.register_strategies(StrategyRegistry)
