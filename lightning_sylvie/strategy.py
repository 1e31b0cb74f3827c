"""The Lightning strategy: places the parts, attaches the model, and tears both down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor

from lightning_sylvie.attach import Attachment, Exchange, wants_out_edges
from lightning_sylvie.batch import OneBatch, ShardData, find_shard
from lightning_sylvie.exchange import Halo
from lightning_sylvie.gradient import GradientReducer
from lightning_sylvie.options import allow_full_graph_loader, check_masks, check_trainer
from lightning_sylvie.partition import Partitioner, resolve
from lightning_sylvie.placement import Placement
from lightning_sylvie.shard import Shard
from lightning_sylvie.steplog import ALREADY_GLOBAL, StepLog
from lightning_sylvie.transport import Transport, connect
from lightning_sylvie.verify import Verification, verify

LossReduction = Literal["mean", "sum"] | Callable[[Any], float | Tensor]


class SylvieStrategy(DDPStrategy):
    """Trains one graph on all devices: a part per rank, halo rows exchanged in every layer.

    At 32 bits and in sync mode this is the single-device computation: outputs, loss and gradients
    agree to rounding, for every partition (spec: One epoch).

    Args:
        bits: Bits per value on the wire; 32 leaves rows as they are.
        mode: ``"sync"``: every layer waits for this epoch's halo rows.
        exchange: ``"message"``: halo rows arrive where a layer reads its neighbours; ``"input"``:
            at the layer's input, as the paper draws it.
        partition: ``"metis"``, ``"random"``, ``"streaming"``, int64 ``(num_nodes,)`` with a part
            per node, or a `Partitioner`.
        cache_dir: Where parts are kept between runs; None: the user's cache folder.
        loss_reduction: What `training_step` returns: the ``"mean"`` over the batch's `train_mask`
            (all its nodes without one), a ``"sum"``, or a weighted mean: a function of the batch
            that gives the sum of its weights.
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
        bits: int = 32,
        mode: Literal["sync"] = "sync",
        exchange: Exchange = "message",
        partition: str | Tensor | Partitioner = "metis",
        cache_dir: str | Path | None = None,
        loss_reduction: LossReduction = "mean",
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
        if bits != 32:
            raise ValueError(f"expected bits=32, got {bits}: this version does not quantize yet")
        if mode != "sync":
            raise ValueError(f'expected mode="sync", got {mode!r}: this version is synchronous')
        if exchange not in ("message", "input"):
            raise ValueError(f'expected exchange "message" or "input", got {exchange!r}')
        if loss_reduction not in ("mean", "sum") and not callable(loss_reduction):
            raise ValueError(
                f'expected loss_reduction "mean", "sum" or a function, got {loss_reduction!r}'
            )
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
        self.partition, self.cache_dir = resolve(partition), cache_dir
        self.loss_reduction, self.debug = loss_reduction, debug
        self._transports: list[Transport] = []
        self._placement: Placement | None = None
        self._attachment: Attachment | None = None
        self._reducer: GradientReducer | None = None
        self._log: StepLog | None = None
        self._seeded = self._checked = self._holding = False
        self._share = 1.0
        self._batch_shard: Shard | None = None

    def __repr__(self) -> str:
        return (
            f"SylvieStrategy(bits={self.bits}, mode={self.mode!r}, exchange={self.exchange!r}, "
            f"partition={self.partition.settings!r})"
        )

    # Life: environment, set-up, tear-down

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if environment.creates_processes_externally:  # torchrun, SLURM: ours would start them twice
            self._launcher = _SubprocessScriptLauncher(
                environment, self.num_processes, self.num_nodes
            )
        else:
            super()._configure_launcher()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}  # every rank's loader yields the whole graph

    def setup_environment(self) -> None:
        super().setup_environment()
        if not self._transports:
            self._transports = [self._connect(), self._connect()]
            self._placement = Placement(self.halo_transport, self.cache_dir)
        if self.lightning_module is not None:
            allow_full_graph_loader(self.lightning_module.trainer)

    def _connect(self) -> Transport:
        """A transport on a process group of its own."""
        timeout = self._timeout or timedelta(minutes=30)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return connect(None, timeout=timeout)
        return connect(dist.new_group(timeout=timeout), timeout=timeout)

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
        halo = Halo(self.halo_transport)
        self._attachment = Attachment(module, halo, exchange=self.exchange)
        self._log = StepLog(module.log, self.gradient_transport)
        module.log = self._log  # type: ignore[method-assign, assignment]
        super().setup(trainer)
        if not self._seeded:  # equal weights on all ranks, different dropout masks
            self._seeded = True
            torch.manual_seed(torch.initial_seed() + 1_000_003 * self.global_rank)

    def configure_ddp(self) -> None:
        assert self.model is not None
        if dist.is_initialized():
            _sync_module_states(self.model)
        self._reducer = GradientReducer(list(self.model.parameters()), self.gradient_transport)

    def teardown(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop("log", None)
        self._reducer = self._log = self._batch_shard = None
        self._checked = False
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        for transport in self._transports:
            transport.report_failure(exception)
        super().on_exception(exception)

    # Data

    def process_dataloader(self, dataloader: object) -> object:
        """A loader of this rank's part of the one graph that `dataloader` yields.

        Only rank 0 reads its loader; the graph is cut once per content.
        """
        assert self._placement is not None and self._attachment is not None
        assert self.lightning_module is not None
        shard = self._placement.shard(
            dataloader,
            self.partition,
            reverse=wants_out_edges(self.lightning_module.modules()),
            change=self._on_device,
        )
        self._attachment.keep(shard)
        check_masks(shard, self.loss_reduction)
        return OneBatch(ShardData.of(shard))

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        if find_shard(batch) is not None:
            return batch  # placed on this rank's device once, at set-up
        return super().batch_to_device(batch, device, dataloader_idx)

    def _on_device(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self.root_device)
        converted: Tensor = self.precision_plugin.convert_input(moved)
        return converted

    # Steps

    @contextmanager
    def _using(self, shard: Shard, stage: str) -> Iterator[StepLog]:
        assert self._attachment is not None and self._log is not None
        checking = self.debug and not self._checked
        with self._attachment.halo.using(shard, checking=checking), self._log.step(stage, shard):
            yield self._log
        self._checked = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        shard = self._shard_of(args, kwargs)
        self._batch_shard = shard
        with self._using(shard, "training") as log:
            self._share = self._loss_share(args, log, shard)
            output = super().training_step(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, dict) else output
            told = log.flush(loss, self._share)
        if told is None:
            return output
        loss = _Told.apply(loss, told)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, "validating", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, "testing", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._evaluate(super().predict_step, "predicting", args, kwargs)
        assert self._placement is not None
        return self._placement.gather(output, self._shard_of(args, kwargs))

    def _evaluate(self, step: Any, stage: str, args: Any, kwargs: Any) -> Any:
        with self._using(self._shard_of(args, kwargs), stage) as log:
            output = step(*args, **kwargs)
            log.flush(None, 0.0)
        return output

    def _shard_of(self, args: Any, kwargs: Any) -> Shard:
        shard = find_shard(list(args)) or find_shard(list(kwargs.values()))
        if shard is None:
            raise RuntimeError(
                "expected a batch with this rank's part, got none: a hook of the module or the "
                "data module replaced the batch; change its fields instead"
            )
        return shard

    def _loss_share(self, args: Any, log: StepLog, shard: Shard) -> float:
        """What this rank's loss counts in the sum over ranks (spec: Loss)."""
        if self.loss_reduction == "sum":
            return 1.0
        if self.loss_reduction == "mean":
            return log.share(shard, "train_mask")
        assert callable(self.loss_reduction)
        local = torch.as_tensor(self.loss_reduction(args[0]), dtype=torch.float64)
        total = local.to(self.root_device, copy=True)
        self.gradient_transport.all_reduce(total)
        return float(local) / float(total) if local else 0.0

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of this rank's share, then the sum of all gradients over the ranks.

        The share is scaled up by the number of ranks and the sum down by it, so gradients that an
        earlier backward of the same step has summed already stay as they are. Hooks after backward
        and clipping see the gradients of the whole graph.
        """
        module, plugin = self.lightning_module, self.precision_plugin
        assert self._attachment is not None and self._batch_shard is not None
        assert module is not None and self._reducer is not None
        num_ranks = self.gradient_transport.num_ranks
        closure_loss = plugin.pre_backward(closure_loss, module)
        with self._attachment.halo.using(self._batch_shard):
            scaled = closure_loss * (self._share * num_ranks)
            plugin.backward(scaled, module, optimizer, *args, **kwargs)
        if not self._holding:
            self._reducer.reduce(scale=1.0 / num_ranks)
        return plugin.post_backward(closure_loss, module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

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
            tolerance=tolerance,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for suffix, method in methods.items():
            name = f"sylvie{suffix}"
            if name not in strategy_registry:
                description = f"Partition-parallel full-graph training, processes by {method!r}"
                strategy_registry.register(name, cls, description, start_method=method)


class _Told(torch.autograd.Function):
    """The loss of the whole graph as value, this rank's own loss as gradient.

    LBFGS's line search, checks for NaN and progress bars see one number on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, told: Tensor) -> Tensor:  # type: ignore[override]
        return told.clone().view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


SylvieStrategy.register_strategies(StrategyRegistry)
