"""What a real SGLang server records is what transformers computes, for each sequence alone."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sglang_servers import CHUNK, COUNTING_CHANNEL, server_config, write_counting_target

from eagle3.capture.client import SGLangEngine
from eagle3.capture.engine import Captured, CodedCapture, SetAside
from eagle3.capture.generation import Generation
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.launch import ServerError
from eagle3.capture.server import capturing_servers
from eagle3.capture.staging import request_id
from eagle3.capture.staging_area import SampleError, StagingArea
from eagle3.config import RegenerateConfig, TargetConfig, UserError
from eagle3.prompts.conversations import Conversation
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.server_rendering import compare_with_server
from eagle3.prompts.tokenizers import load_tokenizer

SMOLLM2_LAYERS = [3, 15, 27]
COUNTING_LAYERS = [0, 3, 7]  # both ends can be captured
MAX_RELATIVE_ERROR = 1e-4  # fp32, other summation order; a neighbouring layer is tens of percent away


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    config = server_config(tmp_path_factory.mktemp("smollm2"), staging_bytes=64 * 2**20)
    with capturing_servers(config, str(smollm2_dir), SMOLLM2_LAYERS) as (servers, area):
        yield SGLangEngine(servers, area, config, SMOLLM2_LAYERS)


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> TransformersEngine:
    target = TargetConfig(str(smollm2_dir), dtype="float32", device="cpu")
    return TransformersEngine(target, SMOLLM2_LAYERS, load_tokenizer(str(smollm2_dir), False))


def random_ids(*lengths: int, seed: int = 0, vocab_size: int = 49000) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(17, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def assert_same_states(captured: Captured, sequence: list[int], reference: TransformersEngine) -> None:
    """Compares with transformers' `hidden_states`, row by row."""
    boundaries = reference.hidden_states(sequence)
    pairs = [
        *zip(captured.aux_hidden_states.split(boundaries[0].shape[1], dim=1), SMOLLM2_LAYERS, strict=True),
        (captured.last_hidden_states, len(boundaries) - 1),
    ]
    for state, layer in pairs:
        assert len(state) == len(sequence), (layer, len(state), len(sequence))
        cosine = torch.cosine_similarity(state, boundaries[layer], dim=1).min()
        error = ((state - boundaries[layer]).norm(dim=1) / boundaries[layer].norm(dim=1)).max()
        assert cosine >= 0.999, (layer, float(cosine))
        assert error <= MAX_RELATIVE_ERROR, (layer, float(error))


def test_prompts_of_very_different_length_in_one_batch(smollm2: SGLangEngine, reference: TransformersEngine) -> None:
    sequences = random_ids(1, 90, 17)
    for captured, sequence in zip(smollm2.capture(sequences), sequences, strict=True):
        assert_same_states(captured, sequence, reference)


def test_prompts_are_rendered_as_the_server_renders_them(smollm2: SGLangEngine, smollm2_dir: Path) -> None:
    renderer = ChatRenderer(load_tokenizer(str(smollm2_dir), False), {})
    asked = {"role": "user", "content": "Why is the sky blue?\n\n  \u4f60\u597d"}
    answered = {"role": "assistant", "content": " Air scatters .\n"}
    talks = [[asked], [{"role": "system", "content": "Be brief."}, asked, answered, asked], [asked, answered] * 3]
    rows = [Conversation(id=str(line), messages=tuple(talk), line=line) for line, talk in enumerate(talks, start=1)]
    seen = compare_with_server(smollm2.servers[0].url, rows, renderer)
    assert (seen.num_compared, seen.refused, seen.differences) == (3, [], [])


def test_prompt_of_two_and_a_half_chunks(smollm2: SGLangEngine, reference: TransformersEngine) -> None:
    (sequence,) = random_ids(CHUNK * 5 // 2, seed=1)
    (captured,) = smollm2.capture([sequence])
    assert_same_states(captured, sequence, reference)


def test_shared_prefix_sent_twice(smollm2: SGLangEngine, reference: TransformersEngine) -> None:
    prefix, first, second = random_ids(60, 20, 25, seed=2)
    sequences = [prefix + first, prefix + second]
    for captured, sequence in zip(smollm2.capture(sequences * 2), sequences * 2, strict=True):
        assert_same_states(captured, sequence, reference)


def test_prefix_cache_hit_is_an_error_and_not_a_short_sample(smollm2: SGLangEngine) -> None:
    (sequence,) = random_ids(40, seed=3)
    body = {"input_ids": sequence, "sampling_params": {"max_new_tokens": 1}}
    for attempt in ("first", "again"):  # without the key that isolates our own requests
        request = request_id(len(sequence), attempt)
        smollm2.servers[0].post("/generate", {**body, "rid": request}, timeout_seconds=60)
    with pytest.raises(SampleError, match="must begin at token 0, got token 39: the prefix came from the server's"):
        smollm2.area.wait_for(request, timeout_seconds=20)
    for attempt in ("first", "again"):
        smollm2.area.discard(request_id(len(sequence), attempt))


def test_head_on_the_last_state_gives_the_servers_own_tokens(
    smollm2: SGLangEngine, reference: TransformersEngine
) -> None:
    sequences = random_ids(150, 140, seed=4)
    head = reference.model.get_output_embeddings().weight.detach()
    ours, theirs = [], []
    for captured, top in zip(smollm2.capture(sequences), smollm2.top_two(sequences, together=True), strict=True):
        is_clear = top.logprobs[:, 0] - top.logprobs[:, 1] > 1e-3  # fp32 noise of logits is below 1e-4
        ours.append((captured.last_hidden_states @ head.T).argmax(dim=-1)[is_clear])
        theirs.append(top.ids[:, 0][is_clear])
    agreement = (torch.cat(ours) == torch.cat(theirs)).float().mean()
    assert len(torch.cat(ours)) >= 200
    assert agreement >= 0.99, float(agreement)


def test_answers_are_transformers_greedy_tokens_while_prompts_are_captured(
    smollm2: SGLangEngine, reference: TransformersEngine
) -> None:
    prompts, sequences = random_ids(12, 30, seed=5), random_ids(70, 80, 200, seed=6)
    settings = RegenerateConfig(max_new_tokens=12)
    with ThreadPoolExecutor(1) as pool:  # so that batches mix prefill and decoding
        answers = pool.submit(smollm2.generate, prompts, settings)
        captured = smollm2.capture(sequences)
    for states, sequence in zip(captured, sequences, strict=True):
        assert_same_states(states, sequence, reference)
    assert answers.result() == reference.generate(prompts, settings)


def test_answer_ends_with_its_end_token(
    smollm2: SGLangEngine, reference: TransformersEngine, smollm2_dir: Path
) -> None:
    tokenizer = load_tokenizer(str(smollm2_dir), False)
    text = "<|im_start|>user\nAnswer with one word: what is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text, add_special_tokens=False)
    (answer,) = smollm2.generate([prompt], RegenerateConfig(max_new_tokens=40))
    assert [answer] == reference.generate([prompt], RegenerateConfig(max_new_tokens=40))
    assert isinstance(answer, Generation)
    assert answer.finished
    assert answer.ids[-1] in reference.end_ids


def test_sample_larger_than_the_budget_passes_alone(smollm2: SGLangEngine) -> None:
    budget = smollm2.area.budget_bytes
    smollm2.area.budget_bytes = 100_000  # 10 tokens
    try:
        results = dict(smollm2.capture_each(random_ids(30, 4, 5, 25, seed=7)))
    finally:
        smollm2.area.budget_bytes = budget
    assert {index: len(each.last_hidden_states) for index, each in results.items() if isinstance(each, Captured)} == {
        0: 30,
        1: 4,
        2: 5,
        3: 25,
    }
    assert smollm2.area.used_bytes == 0


def test_stopping_early_leaves_nothing_behind(smollm2: SGLangEngine) -> None:
    results = smollm2.capture_each(random_ids(*[30] * 20, seed=8))
    next(results)
    results.close()
    assert smollm2.area.used_bytes == 0
    assert len(smollm2.capture(random_ids(9, seed=9))) == 1


def test_too_long_sequence_is_refused(smollm2: SGLangEngine) -> None:
    with pytest.raises(UserError, match=rf"must have 1 to {smollm2.max_tokens} tokens.*got {smollm2.max_tokens + 1}"):
        smollm2.capture([[20] * (smollm2.max_tokens + 1)])


def test_other_boundaries_than_an_attached_server_records_are_refused(smollm2: SGLangEngine, tmp_path: Path) -> None:
    directory = smollm2.area.directory
    config = server_config(tmp_path, urls=[smollm2.servers[0].url], staging_dir=str(directory))
    with (
        capturing_servers(config, "unused", [1, 2, 3]) as (servers, area),
        pytest.raises(ServerError, match=r"must record the boundaries \[1, 2, 3\], got \[3, 15, 27\]"),
    ):
        SGLangEngine(servers, area, config, [1, 2, 3])
    with capturing_servers(config, "unused", SMOLLM2_LAYERS) as (servers, area):
        attached = SGLangEngine(servers, area, config, SMOLLM2_LAYERS)
        assert len(attached.capture(random_ids(6))[0].last_hidden_states) == 6


def test_server_that_records_elsewhere_is_refused(
    smollm2: SGLangEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.capture.client.FILE_SECONDS", 0.5)
    config = server_config(tmp_path)
    with (
        StagingArea(tmp_path, 1000, shared=True) as area,
        pytest.raises(ServerError, match="must record what it runs, got the server answered but wrote nothing"),
    ):
        SGLangEngine(smollm2.servers, area, config, SMOLLM2_LAYERS)


def test_boundary_k_is_what_enters_layer_k_and_a_killed_server_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("counting")
    target = write_counting_target(directory / "target")
    config = server_config(directory)
    with capturing_servers(config, str(target), COUNTING_LAYERS) as (servers, area):
        engine = SGLangEngine(servers, area, config, COUNTING_LAYERS)
        process = servers[0].process
        assert process is not None
        sequences = random_ids(*[11] * 40, vocab_size=300)
        results: dict[int, Captured | CodedCapture | SetAside] = {}
        for index, result in engine.capture_each(sequences):
            results[index] = result
            if len(results) == 5:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.num_starts == 2
    assert sorted(results) == list(range(40))
    with safe_open(target / "model.safetensors", framework="pt") as file:
        embeddings = file.get_tensor("model.embed_tokens.weight")
    for index, result in results.items():
        assert isinstance(result, Captured), result
        wanted = embeddings[torch.tensor(sequences[index])].repeat(1, 3)  # (T, A*D)
        for i, layer in enumerate(COUNTING_LAYERS):
            wanted[:, i * 64 + COUNTING_CHANNEL] = 2.0**layer - 1
        assert torch.equal(result.aux_hidden_states, wanted)
