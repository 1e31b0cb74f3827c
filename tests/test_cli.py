"""The command line: what it prints is what a run does, and it takes what people write in YAML."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GraphSAGE
from trainers import small_graph

from lightning_sylvie import GraphDataModule, SylvieModule
from lightning_sylvie.ahead import describe_run
from lightning_sylvie.attach import Attachment
from lightning_sylvie.batch import ShardData
from lightning_sylvie.cli import GraphTrainer, main
from lightning_sylvie.exchange import Halo
from lightning_sylvie.named import named_graph
from lightning_sylvie.quantizer import choose
from lightning_sylvie.store import ShardStore
from lightning_sylvie.transport import Transport
from lightning_sylvie.transport.threads import run_threads

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "examples/configs").glob("*.yaml"))

# Lightning's own use of jsonargparse.
pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of two devices beside a saved graph, in a folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning_sylvie"])
    torch.save(small_graph(torch.float32), "graph.pt")
    gnn = {"in_channels": 6, "hidden_channels": 20, "num_layers": 2, "out_channels": 4}
    model = {"class_path": "torch_geometric.nn.GraphSAGE", "init_args": gnn}
    config = {
        "model": {"class_path": "lightning_sylvie.SylvieModule", "init_args": {"model": model}},
        "data": {"data": "graph.pt", "partition": "random", "cache_dir": "cache"},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_describe_names_parts_and_bytes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["describe", "--config", str(run), "--trainer.strategy.keep_features=false"])
    printed = capsys.readouterr().out
    assert "widths [6, 20], backward [20]" in printed
    nodes = [int(line.split()[1]) for line in printed.splitlines()[1:3]]
    assert nodes == [60, 60]
    assert list((run.parent / "cache").glob("2-*")), "training does not find the parts"


@pytest.mark.parametrize("bits", [1, 8, 32])
@pytest.mark.parametrize("name", ["GraphSAGE", "GAT"])
def test_described_bytes_are_the_bytes_of_an_epoch(bits: int, name: str, tmp_path: Path) -> None:
    """Against the counters of a step whose rows are really coded and moved."""
    data, module = small_graph(torch.float32), SylvieModule(gnn(name))
    loaded = GraphDataModule(data, partition="random", cache_dir=tmp_path)
    trainer = GraphTrainer(
        strategy="sylvie", accelerator="cpu", devices=3, logger=False, enable_checkpointing=False
    )
    description = describe_run(trainer, module, loaded)
    store = ShardStore(tmp_path)
    (entry,) = tmp_path.glob("3-*")

    def second_step(transport: Transport) -> int:
        shard = store.read(entry.name, transport.rank)
        model, halo = gnn(name), Halo(transport, choose(bits))
        Attachment(model, halo).keep(shard)
        batch = ShardData.of(shard)
        with halo.using(shard):
            for _ in range(2):
                before = sum(transport.bytes_sent)
                model(batch.x, batch.edge_index).sum().backward()
        return sum(transport.bytes_sent) - before

    sent = run_threads(second_step, 3)
    assert [description.bytes_per_epoch(part, bits) for part in range(3)] == sent
    assert sum(sent) > 0


def gnn(name: str) -> torch.nn.Module:
    if name == "GraphSAGE":
        return GraphSAGE(-1, 40, num_layers=3, out_channels=4)
    return GAT(6, 32, num_layers=2, out_channels=4, heads=2, v2=True)


def test_partition_makes_a_folder_to_train_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["partition", "--config", str(run), "--folder", "parts"])
    assert "2 parts in parts" in capsys.readouterr().out
    found = [ShardStore(run.parent).read("parts", rank) for rank in range(2)]
    assert sorted(torch.cat([shard.node_id for shard in found]).tolist()) == list(range(120))
    assert GraphDataModule(run.parent / "parts").train_dataloader().folder == run.parent / "parts"
    with pytest.raises(ValueError, match="which is there: remove it"):
        main(["partition", "--config", str(run), "--folder", "parts"])
    with pytest.raises(ValueError, match="got inductive=True: let fit cut both"):
        main(["partition", "--config", str(run), "--data.inductive=true", "--folder", "other"])


def test_describe_reads_parts_made_ahead(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["describe", "--config", str(run)])
    whole = capsys.readouterr().out
    main(["partition", "--config", str(run), "--folder", "parts"])
    capsys.readouterr()
    main(["describe", "--config", str(run), "--data.data=parts"])
    assert capsys.readouterr().out == whole


def test_other_strategies_are_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="expected SylvieStrategy, got DDPStrategy"):
        main(["describe", "--config", str(run), "--trainer.strategy=ddp"])


def test_one_device_fits_tests_predicts_and_reports(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", str(run), "--trainer.devices=1", "--trainer.log_every_n_steps=1"]
    options += ["--trainer.logger=lightning.pytorch.loggers.CSVLogger"]
    options += ["--trainer.logger.save_dir=logs"]
    options += ["--model.init_args.optimizer=torch.optim.SGD"]
    options += ["--model.init_args.optimizer.init_args.lr=0.5", "--model.init_args.metrics=[f1]"]
    cli = main(["fit", *options])
    (optimizer,) = cli.trainer.optimizers
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert "val_f1" in cli.trainer.callback_metrics
    main(["test", *options])
    assert "test_f1" in capsys.readouterr().out
    main(["predict", *options])
    main(["report", *options, "--run=logs/lightning_logs/version_0", "--output=page.html"])
    page = Path("page.html").read_text()
    assert "<td>val_f1</td>" in page
    assert "edge cut 0.0%" in page


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_of_examples(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each makes a model whose training step runs in two parts, on a small graph of its sizes."""
    monkeypatch.setattr(sys, "argv", ["lightning_sylvie"])
    monkeypatch.syspath_prepend(str(ROOT))
    options = [
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        f"--data.cache_dir={tmp_path}",
    ]
    cli = main(["--config", str(path), *options], run=False)
    inputs, hidden, outputs = sizes(cli.config)
    y = torch.rand(60, outputs) if path.stem in ("yelp", "amazon_products") else torch.arange(60)
    data = Data(
        x=torch.rand(60, inputs),
        edge_index=torch.randint(60, (2, 200)),
        y=y.round() if y.dim() == 2 else y % outputs,
    )
    cli.datamodule._source = data
    description = describe_run(cli.trainer, cli.model, cli.datamodule)
    assert len(description.parts) == cli.trainer.num_devices
    assert description.widths == description.gradient_widths
    assert set(description.widths) == {hidden}


def sizes(config: Any) -> tuple[int, int, int]:
    """Input, hidden and output channels of a configuration's model."""
    model = config.model.init_args.model.init_args
    first = model if "in_channels" in model else model.gnn.init_args
    return first.in_channels, first.hidden_channels, model.out_channels


def test_without_jsonargparse_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delitem(sys.modules, "lightning_sylvie.cli")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-sylvie\[cli\]'"):
        importlib.import_module("lightning_sylvie.cli")


def test_names_are_those_of_datasets(tmp_path: Path, data_root: Path) -> None:
    raw = tmp_path / "data/Amazon/Photo/raw"
    raw.parent.mkdir(parents=True)
    raw.symlink_to(data_root / "Amazon/Photo/raw")
    assert named_graph("photo", tmp_path / "data").num_nodes == 7650
    with pytest.raises(ValueError, match=r"expected a file or a dataset, such as .*'Photo'"):
        named_graph("Fotos")
