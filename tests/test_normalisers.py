"""What a store lacks of the target's log-normalisers is made before the first step, and trains as if it were stored."""

import dataclasses
from pathlib import Path

import pytest
import torch
from target_stores import write_target_store
from tiny_training import learnable_sample, write_store
from training_runs import assert_same_training, six_steps, with_run

from eagle3.config import TrainConfig
from eagle3.draft.target_weights import load_target_weights
from eagle3.features.store import FeatureStore
from eagle3.training import normalisers
from eagle3.training.distributed import World
from eagle3.training.normalisers import add_normalisers
from eagle3.training.packs import PackReader
from eagle3.training.trainer import train

ONE_PROCESS = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return six_steps(tmp_path_factory.mktemp("normalisers"))


def test_shards_get_what_they_lack(base: TrainConfig, tmp_path: Path) -> None:
    weights = load_target_weights(Path(base.target.path))
    samples = [learnable_sample(number, weights.lm_head) for number in range(6)]
    stored = torch.full((samples[2].last_rows.numel(),), 5.0)  # another number: what is stored is not made again
    samples[2] = dataclasses.replace(samples[2], target_logz=stored)
    store = FeatureStore(write_target_store(tmp_path / "store", Path(base.target.path), samples))
    everything = list(range(len(store)))
    assert store.shards_without_normalisers(everything)
    assert PackReader(store, 1, pin=False).read([0, 2]).tokens.target_logz is None
    add_normalisers(store, everything, weights, ONE_PROCESS, torch.float32)
    assert not store.shards_without_normalisers(everything)
    for index, entry in enumerate(store.entries):
        seen, sample = store.normalisers(index), store[index]
        assert seen is not None
        wanted = (sample.last_hidden_states.double() @ weights.lm_head.double().T).logsumexp(-1).float()
        torch.testing.assert_close(seen, stored if entry.sample_id == "s2" else wanted, rtol=1e-5, atol=1e-5)
    packed = PackReader(store, 1, pin=False).read([4, 2, 0]).tokens
    assert packed.target_logz is not None
    assert torch.equal(
        packed.target_logz, torch.cat([part for i in (4, 2, 0) if (part := store.normalisers(i)) is not None])
    )


def test_they_do_not_depend_on_the_number_of_ranks(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_target_weights(Path(base.target.path))
    path = tmp_path / "store"
    samples = [learnable_sample(number, weights.lm_head) for number in range(7)]
    write_target_store(path, Path(base.target.path), samples, shard_bytes=1)
    whole = FeatureStore(path)
    assert len({entry.shard for entry in whole.entries}) == 7
    sums: list[torch.Tensor] = []
    everything = list(range(len(whole)))
    add_normalisers(whole, everything, weights, ONE_PROCESS, torch.float32)

    def sum_of_all(values: torch.Tensor) -> torch.Tensor:  # once the last rank is there
        sums.append(values)
        return torch.stack(sums).sum(dim=0)

    monkeypatch.setattr(normalisers, "reduce_sum", sum_of_all)
    store = FeatureStore(path)
    for rank in range(3):
        shared = FeatureStore(path) if rank < 2 else store
        add_normalisers(shared, everything, weights, World(rank, 3, torch.device("cpu")), torch.float32)
    for index in everything:
        seen, wanted = store.normalisers(index), whole.normalisers(index)
        assert seen is not None
        assert wanted is not None
        assert torch.equal(seen, wanted)


def test_a_store_without_trains_as_one_with(base: TrainConfig, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", Path(base.target.path), with_normalisers=True)
    config = dataclasses.replace(base, data=dataclasses.replace(base.data, path=str(store)))
    wanted = train(with_run(config, dir=str(tmp_path / "with")))
    assert_same_training(train(with_run(base, dir=str(tmp_path / "without"))), wanted)
