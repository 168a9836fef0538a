"""Trains tiny drafters that differ by their seed alone, and writes what each counted: tests/seed_pairs.json.

python tests/record_seed_pairs.py, five minutes on one CPU core; PYTHONPATH names the repository.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

import torch
from conftest import random_sample, write_tiny_target
from target_stores import write_target_store
from tiny_training import tiny_config

from eagle3.config import TrainConfig
from eagle3.draft.questions import Question, read_questions
from eagle3.draft.target_weights import load_target_weights
from eagle3.features.record import FeatureSample
from eagle3.training.trainer import train

NUM_PAIRS = 20
NUM_OTHERS = 20  # runs that the spread by seed is measured on, none of the pairs'
NUM_STEPS = 24
RECORD = Path(__file__).with_name("seed_pairs.json")


def write_store(path: Path, target: Path, num_samples: int = 150) -> Path:
    """Writes samples that follow a rule but for some tokens, more of them in some samples than in others."""
    lm_head = load_target_weights(target).lm_head
    return write_target_store(path, target, [noisy_sample(number, lm_head) for number in range(num_samples)])


def noisy_sample(number: int, lm_head: torch.Tensor) -> FeatureSample:
    """Sample `number`: each of 24 tokens has a successor, which follows it with a probability of 0.4 to 0.9."""
    generator = torch.Generator().manual_seed(number)
    sample = random_sample(
        f"s{number}", [0] * 6 + [1] * int(torch.randint(20, 50, (), generator=generator)), seed=number
    )
    keeps_to_it = 0.4 + 0.5 * float(torch.rand((), generator=generator))
    ids = [int(torch.randint(24, (), generator=generator))]
    while len(ids) < sample.input_ids.numel():
        follows = float(torch.rand((), generator=generator)) < keeps_to_it
        ids.append(successor(ids[-1]) if follows else int(torch.randint(24, (), generator=generator)))
    likely = torch.tensor([3 + successor(ids[row]) for row in sample.last_rows.tolist()])
    return dataclasses.replace(sample, input_ids=3 + torch.tensor(ids).int(), last_hidden_states=3 * lm_head[likely])


def successor(token: int) -> int:
    return (5 * token + 7) % 24


def seeded(config: TrainConfig, seed: int, num_steps: int) -> TrainConfig:
    """Returns the recipe with another seed of weights and of orders."""
    data = dataclasses.replace(config.data, seed=seed, held_out_share=0.4, samples_per_step=8)
    run = dataclasses.replace(
        config.run, seed=seed, max_steps=num_steps, epochs=50, validate_every=10_000, save_every=10_000, log_every=100
    )
    return dataclasses.replace(config, data=data, run=run)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        target = write_tiny_target(directory / "target")
        store = write_store(directory / "store", target)
        config = tiny_config(store, target, directory / "run")

        def questions(seed: int, num_steps: int) -> list[Question]:
            run_dir = train(seeded(config, seed, num_steps))
            return read_questions(run_dir / "questions.jsonl")["held_out"]

        trained = [questions(seed, NUM_STEPS) for seed in range(2 * NUM_PAIRS)]
        half_trained = questions(0, NUM_STEPS // 2)
        others = [questions(seed, NUM_STEPS) for seed in range(2 * NUM_PAIRS, 2 * NUM_PAIRS + NUM_OTHERS)]
    answers = [question.answer for question in trained[0]]
    record = {
        "sample_ids": [answer.sample_id for answer in answers],
        "num_tokens": [answer.num_tokens for answer in answers],
        "rounds": [[question.answer.rounds for question in run] for run in trained],
        "rounds_half_trained": [question.answer.rounds for question in half_trained],
        "rounds_of_others": [[question.answer.rounds for question in run] for run in others],
    }
    RECORD.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
