"""Same data on any world size, exact resume, nothing left out in silence."""

from heapq import heapreplace

import pytest
import torch
from tiny_training import write_target_and_store

from eagle3.config import DataConfig, UserError
from eagle3.features.store import FeatureStore
from eagle3.training.batches import Batches, Position, deal, epoch_order, num_counted_rows, usable_samples
from eagle3.training.optimizer_step import count_rows
from eagle3.training.sequence_split import Ranks

ALONE = Ranks(0, 1, None)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return FeatureStore(write_target_and_store(tmp_path_factory.mktemp("batches"))[1])


def data_config(**changes: int | bool) -> DataConfig:
    return DataConfig(**({"path": "unused", "samples_per_step": 7, "batch_tokens": 40} | changes))  # type: ignore[arg-type]


def read_epoch(batches: Batches, position: Position) -> list[list[list[str]]]:
    """Returns the packs of each step, all ranks', from a position to its epoch's end."""
    steps, epoch = [], position.epoch
    while position.epoch == epoch:
        batch = batches.load(position)
        steps.append(batch.sample_ids)
        position = batch.next_position
    return steps


def flat(packs: list[list[str]]) -> set[str]:
    return {name for members in packs for name in members}


def test_an_epoch_takes_every_sample_once(store: FeatureStore) -> None:
    batches = Batches(store, list(range(len(store))), data_config(), ALONE, 3)
    steps = read_epoch(batches, Position())
    assert len(steps) == batches.steps_per_epoch == 5  # 30 samples by 7
    names = [name for step in steps for members in step for name in members]
    assert sorted(names) == sorted(entry.sample_id for entry in store.entries)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_steps_have_the_same_samples_on_any_world_size(store: FeatureStore, world_size: int) -> None:
    alone = read_epoch(Batches(store, list(range(30)), data_config(), ALONE, 3), Position(epoch=3))
    for rank in range(world_size):
        batches = Batches(store, list(range(30)), data_config(), Ranks(rank, world_size, None), 3)
        assert [flat(step) for step in read_epoch(batches, Position(epoch=3))] == [flat(step) for step in alone]


def test_ranks_share_out_the_packs_that_each_of_them_names(store: FeatureStore) -> None:
    ranks = [
        Batches(store, list(range(30)), data_config(), Ranks(rank, 3, None), 3).load(Position()) for rank in range(3)
    ]
    assert len({len(batch.packs) for batch in ranks}) == 1
    for micro_step in range(len(ranks[0].packs)):
        for rank, batch in enumerate(ranks):
            names = ranks[0].sample_ids[micro_step * 3 + rank]
            is_filler = batch.has_filler and micro_step == len(batch.packs) - 1
            assert names == ([] if is_filler else list(batch.packs[micro_step].tokens.sample_ids))


def test_token_counts_are_those_of_all_ranks(store: FeatureStore) -> None:
    ranks = [
        Batches(store, list(range(30)), data_config(), Ranks(rank, 2, None), 3).load(Position()) for rank in range(2)
    ]
    packs = [pack for batch in ranks for pack in batch.packs[: len(batch.packs) - batch.has_filler]]
    assert ranks[0].num_tokens == ranks[1].num_tokens == sum(pack.tokens.input_ids.numel() for pack in packs)
    assert ranks[0].num_supervised == sum(int(pack.tokens.loss_mask.sum()) for pack in packs)


def test_reading_goes_on_exactly_at_a_position(store: FeatureStore) -> None:
    batches = Batches(store, list(range(30)), data_config(), ALONE, 3)
    third = batches.load(batches.load(Position()).next_position).next_position
    assert read_epoch(batches, third) == read_epoch(batches, Position())[2:]
    again = Batches(store, list(range(30)), data_config(), ALONE, 3).load(third)
    assert torch.equal(again.packs[0].aux.codes, batches.load(third).packs[0].aux.codes)


def test_orders_differ_by_epoch_and_seed() -> None:
    orders = [epoch_order([0] * 50, seed, epoch, 64) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_packs_stay_within_their_tokens(world_size: int) -> None:
    generator = torch.Generator().manual_seed(world_size)
    for _ in range(50):
        lengths = torch.randint(1, 60, (13,), generator=generator).tolist()
        packs = deal(lengths, 50, world_size)
        assert len(packs) % world_size == 0
        assert sorted(i for members in packs for i in members) == list(range(13))
        for members in packs:
            assert sum(lengths[i] for i in members) <= 50 or len(members) == 1


def test_no_more_packs_than_long_samples_need() -> None:
    assert deal([100] * 5, 50, 1) == [[0], [1], [2], [3], [4]]
    assert deal([100] * 5, 50, 2)[5] == []


def test_many_samples_are_dealt_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples that go two into three packs' tokens, each needs a pack of its own."""
    num_placed = [0]

    def place(heap: list[tuple[int, int]], entry: tuple[int, int]) -> tuple[int, int]:
        num_placed[0] += 1
        return heapreplace(heap, entry)

    monkeypatch.setattr("eagle3.training.batches.heapq.heapreplace", place)
    assert list(map(len, deal([60] * 1000, 90, 3))) == [1] * 1000 + [0] * 2
    assert num_placed[0] < 50 * 1000, num_placed


def test_a_rank_without_samples_repeats_the_shortest_one(store: FeatureStore) -> None:
    ranks = [
        Batches(store, list(range(30)), data_config(samples_per_step=3), Ranks(rank, 4, None), 3) for rank in range(4)
    ]
    batches = [each.load(Position()) for each in ranks]
    assert [batch.has_filler for batch in batches] == [False, False, False, True]
    lengths = [pack.tokens.input_ids.numel() for batch in batches for pack in batch.packs]
    assert lengths[3] == min(lengths[:3])
    assert batches[0].num_tokens == sum(lengths[:3])


def test_long_samples_are_split_over_the_ranks(store: FeatureStore) -> None:
    """Of 14, 17, 14 and 20 tokens in turns; those of 20 have 4 + 7 counted rows."""
    config = data_config(batch_tokens=18, split_sequences=True)
    ranks = [Batches(store, list(range(30)), config, Ranks(rank, 2, None), 3).load(Position()) for rank in range(2)]
    whole = Batches(store, list(range(30)), data_config(batch_tokens=18), ALONE, 3).load(Position())
    assert ranks[0].sample_ids == ranks[1].sample_ids
    assert flat(ranks[0].sample_ids) == flat(whole.sample_ids)
    assert (ranks[0].num_tokens, ranks[0].num_supervised) == (whole.num_tokens, whole.num_supervised)
    split = [[pack.tokens.share is not None for pack in rank.packs] for rank in ranks]
    assert split[0] == split[1] == sorted(split[0], reverse=True)
    assert sum(split[0]) == sum(store.entries[int(name[1:])].num_tokens == 20 for name in flat(whole.sample_ids)) > 0
    real = [pack for rank in ranks for pack in rank.packs[: len(rank.packs) - rank.has_filler]]
    assert torch.equal(
        count_rows([each.tokens for each in real], 3), count_rows([each.tokens for each in whole.packs], 3)
    )


def test_a_step_of_long_samples_alone_has_no_filler(store: FeatureStore) -> None:
    config = data_config(batch_tokens=12, split_sequences=True)
    for rank in range(2):
        batch = Batches(store, list(range(30)), config, Ranks(rank, 2, None), 3).load(Position())
        assert not batch.has_filler
        assert all(pack.tokens.share is not None for pack in batch.packs)


def test_every_rank_gets_work_while_there_is_some() -> None:
    assert sorted(map(len, deal([10] * 8, 8192, 8))) == [1] * 8
    assert sorted(map(len, deal([10, 20], 8192, 4))) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("mask", "counted"),
    [([0, 1, 1], 1), ([1, 1, 0], 0), ([0, 1, 0, 1, 0], 0), ([0, 0, 0], 0), ([1, 1, 1, 1], 2)],
)
def test_a_counted_row_needs_two_supervised_tokens_after_the_first(mask: list[int], counted: int) -> None:
    assert num_counted_rows(torch.tensor(mask, dtype=torch.bool)) == counted


def test_long_samples_are_left_out_and_counted(store: FeatureStore) -> None:
    lengths = [entry.num_tokens for entry in store.entries]
    usable = usable_samples(store, range(len(store)), max_tokens=17)
    assert usable.num_too_long == sum(length > 17 for length in lengths) > 0
    assert usable.num_uncounted == 0
    assert len(usable.indices) == len(store) - usable.num_too_long


def test_no_sample_is_an_error(store: FeatureStore) -> None:
    with pytest.raises(UserError, match="must hold samples to train on, got none of its 30"):
        Batches(store, [], data_config(), ALONE, 3)


def test_an_order_over_few_shards_draws_from_so_many_at_a_time() -> None:
    shards = [number // 10 for number in range(200)]  # 20 shards of 10
    order = epoch_order(shards, 0, 0, 4)
    assert sorted(order) == list(range(200))
    assert order != epoch_order(shards, 0, 1, 4)
    assert order == epoch_order(shards, 0, 0, 4)
    left = dict.fromkeys(range(20), 10)
    for sample in order:
        left[shards[sample]] -= 1
        assert sum(0 < count < 10 for count in left.values()) <= 4
    # The first fifty samples come from several shards of the whole store, and not in their order.
    assert len({shards[sample] for sample in order[:50]}) >= 5
    assert max(shards[sample] for sample in order[:50]) >= 10


def test_a_position_is_followed_by_the_one_that_its_batch_names(store: FeatureStore) -> None:
    batches = Batches(store, list(range(30)), data_config(), ALONE, 3)
    position = Position()
    for _, known in zip(range(12), batches.positions(position), strict=False):
        assert known == position
        position = batches.load(position).next_position
