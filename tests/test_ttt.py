"""Which feature, embedding, position and token each row reads, and that unrolling equals drafting with a KV cache."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_oracle import CachedDrafter, tiny_drafter
from torch import Tensor

from eagle3.config import UserError
from eagle3.draft.fusion import TokenHeads
from eagle3.draft.layer import Rotation
from eagle3.draft.ttt import PackedSequences, chain_matches, pack, unroll
from eagle3.features.record import FeatureSample

# Three documents: a prompt and an answer; two turns, the last one to the very end; nothing supervised.
MASKS = [
    [0, 0, 1, 1, 1, 1, 0],
    [0, 1, 1, 0, 0, 1, 1, 1, 1, 1],
    [0, 0, 0],
]
SWITCHES = [{}, {"fc_norm": True, "norm_output": True}]


def samples_of(masks: list[list[int]], make_sample: Callable[..., FeatureSample]) -> list[FeatureSample]:
    return [make_sample(f"s{i}", mask, seed=i, hidden_size=16, vocab_size=40) for i, mask in enumerate(masks)]


def counted_by_hand(mask: list[int], step: int) -> list[int]:
    return [
        row
        for row in range(len(mask))
        if row + 2 + step < len(mask) and all(mask[token] for token in range(row + 1, row + 3 + step))
    ]


class ReadingLayer:
    """Stands in for the layer, with labels for numbers: writes down what each row reads, adds 1 to what it is fed."""

    def __init__(self) -> None:
        self.reads: list[list[tuple[int, int, int]]] = []  # per step: (feature, embedding, position) of each row

    def embeds_heads(self, embed_tokens: Tensor, token_ids: Tensor, weights: Any, head_dim: int) -> Tensor:
        return embed_tokens[token_ids]

    def project(
        self, added: TokenHeads, hidden: Tensor, weights: Any, matrix: str, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        if matrix != "key_value":
            read = torch.cat([hidden, added.table[added.tokens], rotation.positions[:, None]], dim=-1)
            self.reads.append([(int(a), int(b), int(c)) for a, b, c in read])
        heads = {"query": 1, "key_value": 2, "query_key_value": 3}[matrix]
        return torch.zeros(added.tokens.numel(), heads, 8), hidden, added.table

    def finish(self, residual: Tensor, attended: Tensor, weights: Any, *, recompute: bool) -> tuple[Tensor, Tensor]:
        return residual + 1, residual


def test_alignment_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels for numbers: token t of the second document is 20 + t, its feature 100 * (20 + t)."""
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    token_ids = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23, 24, 25])
    packed = PackedSequences(
        input_ids=token_ids,
        positions=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5]),
        loss_mask=mask,
        document_lengths=(4, 6),
        aux_hidden_states=100.0 * token_ids[:, None],
        target_rows=torch.zeros(0, dtype=torch.int64),
        last_hidden_states=torch.zeros(0, 1),
        target_logz=None,
        sample_ids=("a", "b"),
    )
    layer = ReadingLayer()
    monkeypatch.setattr("eagle3.draft.ttt.embeds_heads", layer.embeds_heads)
    monkeypatch.setattr("eagle3.draft.ttt.project", layer.project)
    monkeypatch.setattr("eagle3.draft.ttt.finish", layer.finish)
    names = SimpleNamespace(query="query", key_value="key_value", query_key_value="query_key_value")
    monkeypatch.setattr("eagle3.draft.ttt.layer_weights", lambda drafter: names)
    config = SimpleNamespace(num_attention_heads=1, num_key_value_heads=1, head_dim=8, norm_output=False)
    drafter: Any = SimpleNamespace(config=config, fuse=lambda aux: aux, rope_tables=lambda num_positions: None)
    rows = [step.rows.tolist() for step in unroll(drafter, torch.arange(30.0)[:, None], packed, 3)]
    assert rows == [[0, 1, 5, 6, 7], [0, 5, 6], [5]]
    assert layer.reads == [
        # feature, embedding of the next token, position
        [(1000, 11, 0), (1100, 12, 1), (2100, 22, 1), (2200, 23, 2), (2300, 24, 3)],
        # own output (the feature + 1), embedding one further, position one further
        [(1001, 12, 1), (2101, 23, 2), (2201, 24, 3)],
        [(2102, 24, 3)],
    ]


def test_counted_rows_are_those_of_the_definition(make_sample: Callable[..., FeatureSample]) -> None:
    packed = pack(samples_of(MASKS, make_sample))
    starts = [0, 7, 17]
    for step, rows in enumerate(packed.counted(5)):
        expected = [
            start + row for start, mask in zip(starts, MASKS, strict=True) for row in counted_by_hand(mask, step)
        ]
        assert rows.tolist() == expected, step


def test_neighbouring_documents_do_not_continue_each_other(make_sample: Callable[..., FeatureSample]) -> None:
    packed = pack(samples_of([[1, 1, 1], [1, 1], [1], [1, 1, 1, 1]], make_sample))
    assert [rows.tolist() for rows in packed.counted(4)] == [[0, 6, 7], [6], [], []]


def test_pack_keeps_every_field(make_sample: Callable[..., FeatureSample]) -> None:
    samples = samples_of(MASKS, make_sample)
    packed = pack(samples)
    assert packed.document_lengths == (7, 10, 3)
    assert packed.positions.tolist() == [*range(7), *range(10), *range(3)]
    assert packed.input_ids.tolist() == [int(token) for sample in samples for token in sample.input_ids]
    assert packed.loss_mask.tolist() == [bool(token) for mask in MASKS for token in mask]
    assert packed.target_rows.tolist() == [1, 2, 3, 4, 7, 8, 11, 12, 13, 14, 15]
    assert packed.sample_ids == ("s0", "s1", "s2")
    assert torch.equal(packed.aux_hidden_states, torch.cat([sample.aux_hidden_states for sample in samples]))
    assert torch.equal(packed.last_hidden_states, torch.cat([sample.last_hidden_states for sample in samples]))
    assert packed.target_logz is None
    moved = packed.to("cpu")
    assert moved.document_lengths == packed.document_lengths
    assert torch.equal(moved.input_ids, packed.input_ids)


def test_pack_names_the_sample_that_lacks_a_last_state(make_sample: Callable[..., FeatureSample]) -> None:
    sample = make_sample("short", [0, 0, 1, 1], hidden_size=16)
    lacking = FeatureSample(
        sample_id="short",
        input_ids=sample.input_ids,
        loss_mask=sample.loss_mask,
        aux_hidden_states=sample.aux_hidden_states,
        last_hidden_states=sample.last_hidden_states[1:],
        last_rows=sample.last_rows[1:],
    )
    with pytest.raises(UserError, match=r"last_rows must hold .*, got none for row 1 and 0 more \(sample 'short'\)"):
        pack([sample, lacking])


@pytest.mark.parametrize("masks", [[], [[0, 0, 0]], [[0, 1], [0, 0, 1]]])
def test_nothing_counted_gives_empty_steps(masks: list[list[int]], make_sample: Callable[..., FeatureSample]) -> None:
    packed = pack(samples_of(masks, make_sample))
    drafter, embed_tokens = tiny_drafter(), torch.randn(40, 16)
    assert [tuple(step.hidden.shape) for step in unroll(drafter, embed_tokens, packed, 3)] == [(0, 16)] * 3
    assert chain_matches(drafter, embed_tokens, packed, 3).matches.shape == (0, 3)


@pytest.mark.parametrize("switches", SWITCHES)
def test_unrolled_steps_equal_drafting_with_a_kv_cache(
    switches: dict[str, Any], make_sample: Callable[..., FeatureSample]
) -> None:
    samples = samples_of(MASKS, make_sample)
    drafter, embed_tokens = tiny_drafter(**switches), torch.randn(40, 16)
    oracle = CachedDrafter(drafter, embed_tokens)
    steps = list(unroll(drafter, embed_tokens, pack(samples), 4))
    assert [step.rows.numel() for step in steps] == [8, 5, 3, 1]
    chains = {}
    for start, sample in zip([0, 7, 17], samples, strict=True):
        for row in counted_by_hand(sample.loss_mask.int().tolist(), 0):
            length = sum(row in counted_by_hand(sample.loss_mask.int().tolist(), step) for step in range(4))
            chains[start + row] = oracle.chain(sample.input_ids, sample.aux_hidden_states, row, length)
    for index, step in enumerate(steps):
        for row, output, normed in zip(step.rows.tolist(), step.hidden, step.normed, strict=True):
            expected = chains[row][index]
            torch.testing.assert_close(output, expected.output, rtol=1e-5, atol=1e-5)  # fp32, other summation order
            torch.testing.assert_close(drafter.norm(output), normed, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(drafter.logits(output), expected.logits, rtol=1e-5, atol=1e-5)


def test_chains_match_where_the_first_choice_is_the_recorded_token(
    make_sample: Callable[..., FeatureSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.draft.ttt.ROWS_PER_CHUNK", 3)
    samples = samples_of(MASKS, make_sample)
    drafter, embed_tokens = tiny_drafter(), torch.randn(40, 16)
    packed = pack(samples)
    # What a step proposes depends on the token before only, so writing it into the next token makes chains that match.
    oracle = CachedDrafter(drafter, embed_tokens)
    for row in (1, 7 + 5, 7 + 6):
        start = 0 if row < 7 else 7
        document = slice(start, start + packed.document_lengths[int(start > 0)])
        chain = oracle.chain(packed.input_ids[document], packed.aux_hidden_states[document], row - start, 1)
        packed.input_ids[row + 2] = drafter.target_ids[chain[0].logits.argmax()]

    found = chain_matches(drafter, embed_tokens, packed, 4)
    assert found.rows.tolist() == packed.counted(1)[0].tolist()
    expected = torch.zeros_like(found.matches)
    for index, row in enumerate(found.rows.tolist()):
        start, number = (0, 0) if row < 7 else (7, 1)
        document = slice(start, start + packed.document_lengths[number])
        length = sum(row - start in counted_by_hand(MASKS[number], step) for step in range(4))
        chain = oracle.chain(packed.input_ids[document], packed.aux_hidden_states[document], row - start, length)
        for step, drafted in enumerate(chain):
            choice = int(drafted.logits.argmax()) + int(drafter.d2t[drafted.logits.argmax()])
            expected[index, step] = choice == int(packed.input_ids[row + 2 + step])
    assert torch.equal(found.matches, expected)
    assert int(found.matches.sum()) >= 3
