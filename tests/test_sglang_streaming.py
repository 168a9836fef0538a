"""Two ranks of a training ask a real SGLang server for the states of their samples."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from sglang_servers import server_config
from tiny_extractions import make_config, prompt_rows, write_prompts
from tiny_training import tiny_config
from training_runs import STEPS, TWO_RANKS, launch, metrics_of, with_run

from eagle3.capture.client import SGLangEngine
from eagle3.capture.extraction import run_extraction
from eagle3.capture.server import capturing_servers
from eagle3.config import RegenerateConfig, ServerConfig, config_to_dict
from eagle3.features.store import FeatureStore
from eagle3.training.trainer import train

LAYERS = [2, 4, 5]


def test_a_training_on_a_servers_stream_is_the_one_on_its_store(tiny_target: Path, tmp_path: Path) -> None:
    own = server_config(tmp_path / "server", flags={"max-total-tokens": 4096})
    with capturing_servers(own, str(tiny_target), LAYERS) as (servers, area):
        SGLangEngine(servers, area, own, LAYERS)  # waits until it records
        attached = ServerConfig(urls=[servers[0].url], staging_dir=str(area.directory), max_requests=4)
        rows = prompt_rows(24)
        extraction = make_config(
            tiny_target,
            tmp_path,
            rows,
            engine="sglang",
            server=attached,
            regenerate=RegenerateConfig(enabled=False),
        )
        run_extraction(extraction)
        # A store has its samples as they came; in a file of that order the stream's have the same numbers.
        order = [entry.sample_id for entry in FeatureStore(extraction.store.path).entries]
        write_prompts(tmp_path / "prompts.jsonl", sorted(rows, key=lambda row: order.index(row["id"])))
        path = tmp_path / "live.yaml"
        path.write_text(yaml.safe_dump(config_to_dict(extraction)))
        config = tiny_config(path, tiny_target, tmp_path / "streamed")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_tokens=400))
        config = with_run(config, max_steps=STEPS, save_every=3, validate_every=3)
        done = launch([*TWO_RANKS, "train.py"], config, tmp_path, "--config", "CONFIG")
        assert done.returncode == 0, done.stderr[-4000:]
        assert not [each.name for each in area.directory.iterdir() if each.suffix == ".safetensors"]
    on_store = dataclasses.replace(config, data=dataclasses.replace(config.data, path=extraction.store.path))
    reference = metrics_of(train(with_run(on_store, dir=str(tmp_path / "on-store"))))
    for line, wanted in zip(metrics_of(tmp_path / "streamed"), reference, strict=True):
        for name in ("step", "loss", "held_out/loss", "held_out/tau"):
            if name in wanted:
                # States are rounded otherwise from forward to forward, and AdamW's first steps make more of it.
                assert line[name] == pytest.approx(wanted[name], rel=1e-3), (line["step"], name)
