"""Every figure in docs/EXPERIMENTS.md, and of scaling in docs/TRAINING.md, is the one in the JSON that it names."""

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from figures import ROOT, assert_holds, experiments, percent, result_named_in, training

CODEC_ERRORS = "benchmarks/results/codec_errors.json"
LOSS_CURVES = "benchmarks/results/loss_curves.json"
DROP_REJECTED = "benchmarks/results/drop_rejected.json"
ATTENTION = "benchmarks/results/attention.json"
WRITER = "benchmarks/results/writer.json"
CAPTURE = "benchmarks/results/capture.json"
SCALING = "benchmarks/results/scaling.json"


def curve_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that compare trainings with the engine and by the dense definition."""
    dense = result["runs"]["dense, fp32"]
    lines = []
    for name, run in result["runs"].items():
        difference = "-" if run is dense else f"{result['largest_difference'][name]:.1e}"
        lines.append(
            f"| {name} | {run['loss'][0]:.3f} | {run['loss'][-1]:.3f} | {difference} | {run['tau']:.3f} "
            f"| {run['seconds']:.0f} |"
        )
    return lines


def test_loss_curves_are_those_of_the_json_and_overlay() -> None:
    text = experiments()
    result = result_named_in(text, LOSS_CURVES)
    assert "![" in text
    assert (ROOT / "docs/loss_curves.png").exists()
    assert_holds(text, curve_lines(result))
    dense = result["runs"]["dense, fp32"]["loss"]
    assert len(dense) >= 30
    # fp32: other summation orders, which the steps amplify; bf16: 8 bits in every product, and the same.
    for name, bound in (("engine, fp32", 2e-3), ("engine, bf16", 3e-2)):
        differences = [abs(a - b) / b for a, b in zip(result["runs"][name]["loss"], dense, strict=True)]
        assert max(differences) == result["largest_difference"][name]
        assert max(differences) < bound, (name, max(differences))


def survivor_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that compare trainings with and without rejected rows."""
    return [
        f"| {pair['seed']} | {pair['all_rows']['tau']:.3f} | {pair['survivors']['tau']:.3f} "
        f"| {pair['difference']:+.3f} | {pair['drafters'][0]:+.3f} to {pair['drafters'][1]:+.3f} "
        f"| {pair['recipes'][0]:+.3f} to {pair['recipes'][1]:+.3f} |"
        for pair in result["pairs"]
    ]


def attention_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that compare attention kernels."""
    return [
        f"| {row['documents']} | {row['kernel']} | {row['forward_ms']:.2f} | {row['backward_ms']:.2f} "
        f"| {percent(row['share_of_limit'])} |"
        for row in result["rows"]
    ]


def codec_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that hold tau by codec."""
    lines = []
    for row in result["rows"]:
        seeds = ", ".join(f"{tau:.3f}" for tau in row["tau_by_seed"])
        against = row["against_exact"]
        paired = against and f"{against['difference']:+.4f} ({against['low']:+.4f} to {against['high']:+.4f})"
        lines.append(
            f"| {row['codec']} | {row['bytes_per_token']:,.0f} | {row['tau']:.3f} ({row['low']:.3f} to "
            f"{row['high']:.3f}) | {seeds} | {paired or '-'} |"
        )
    return lines


def capture_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that say what recording costs a server."""
    return [
        f"| {row['work']}{', chunks' * ('chunked-prefill-size' in row['flags'])} | four threads of it "
        f"| {result['commit'][:7]} | {row['num_requests']:,}, {row['num_pairs']} "
        f"| {row['plain_tokens_per_second']:,.0f} | {row['recorded_tokens_per_second']:,.0f} "
        f"| {100 * row['overhead']:.1f} %, {100 * row['overhead_low']:.1f} to {100 * row['overhead_high']:.1f} |"
        for row in result["rows"]
    ]


def staged_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that hold the speed of an extraction's own thread."""
    rows = {
        **result["gb_per_second"],
        "all": result["all_gb_per_second"],
        "all, number by number": result["number_by_number_gb_per_second"],
    }
    return [f"| {name} | {speed:.2f} |" for name, speed in rows.items()]


def state_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that compare recorded states with those of transformers."""
    names = {
        "llama": "Llama",
        "qwen3": "Qwen3",
        "llama as int8": "Llama, coded as int8 by the server",
        "deepseek_v3": "DeepSeek-V3 (MLA, 8 experts)",
        "kimi_k25": "Kimi-K2.5's wrapper around it",
    }
    lines = []
    for target, name in names.items():
        rows = [row for row in result["rows"] if row["target"] == target]
        cells = [f"{row['mean']:.5f}, {row['median']:.5f}, {row['beside']:.3f}" for row in rows]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def store_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that hold the speed of reader and writer."""
    reader, writer = result["reader"], result["writer"]
    lines = [
        f"| reader, {row['cache']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"
        f"{', checksums too' * row['checked']} | {row['gb_per_second']:.2f} | {row['share_of_plain']:.0%} |"
        for row in reader["rows"]
    ]
    lines.append(
        f"| reader, warm, 8 threads, decoded on the GPU | {reader['decoded_on_gpu']['gb_per_second']:.2f} | - |"
    )
    lines.append(f"| writer | {writer['gb_per_second']:.2f} | - |")
    lines.append(f"| writer, one sync at its end | {writer['synced_once_gb_per_second']:.2f} | - |")
    lines.append(f"| plain write, fsync for each file | {writer['plain_fsync_gb_per_second']:.2f} | - |")
    return [line.replace("% |", " % |") for line in lines]


@pytest.mark.parametrize(
    ("name", "lines_of"),
    [
        (ATTENTION, attention_lines),
        (DROP_REJECTED, survivor_lines),
        ("benchmarks/results/codecs.json", codec_lines),
        ("benchmarks/results/store.json", store_lines),
        (CAPTURE, capture_lines),
        ("benchmarks/results/staged.json", staged_lines),
        ("benchmarks/results/capture_states.json", state_lines),
    ],
)
def test_figures_of_the_experiments_are_those_of_the_json(
    name: str, lines_of: Callable[[dict[str, Any]], list[str]]
) -> None:
    text = experiments()
    result = result_named_in(text, name)
    assert_holds(text, lines_of(result))


def test_codec_errors_are_those_of_the_json() -> None:
    text = experiments()
    result = result_named_in(text, CODEC_ERRORS)
    for row in result["errors"]:
        first = "-" if row["of_typical_first_token"] is None else f"{row['of_typical_first_token']:.2%}"
        line = (
            f"| {row['codec']} | {row['state']} | {row['of_length']:.2%} | {row['of_typical']:.2%} | {first} "
            f"| {row['worst_channel']:.2%} |"
        ).replace("%", " %")
        assert line in text, f"docs/EXPERIMENTS.md must have the line {line!r}"


def test_what_an_fsync_per_shard_costs_is_what_the_json_says() -> None:
    text = experiments()
    result = result_named_in(text, WRITER)
    writer = result["writer"]
    shares = [once / each - 1 for each, once in zip(*writer["seconds"].values(), strict=True)]
    assert f"{-median(shares):.0%} of its throughput".replace("%", " %") in text
    assert 1 - writer["share_of_synced_once"] == pytest.approx(-median(shares))


def scaling_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/TRAINING.md that hold tokens/s on several GPUs."""
    alone = {(row["shape"], row["zero"]): row["tokens_per_second"] for row in result["rows"] if row["gpus"] == 1}
    lines = []
    for row in result["rows"]:
        notes = [note for note in ("cold", "deterministic") if row[note]]
        one = alone.get((row["shape"], row["zero"]))
        scaling = "-" if row["gpus"] == 1 or notes or one is None else f"{row['tokens_per_second'] / one:.2f}"
        lines.append(
            f"| {', '.join([row['shape'], *notes])} | {row['zero']} | {row['gpus']} | {row['tokens_per_second']:,.0f} "
            f"| {scaling} | {row['ms_per_step']:.0f} | {percent(max(row['data_wait_share']))} |"
        )
    return lines


def test_scaling_is_what_the_json_says() -> None:
    text = training()
    result = result_named_in(text, SCALING)
    assert_holds(text, scaling_lines(result))
    rows = {(row["shape"], row["zero"], row["gpus"], row["cold"], row["deterministic"]): row for row in result["rows"]}
    warm, large_warm = (rows[shape, 2, 2, False, False] for shape in ("d4096", "d7168"))
    cold, large_cold = (rows[shape, 2, 2, True, False] for shape in ("d4096", "d7168"))
    needed = []  # GB/s of the store at the speed of the warm cache; a cold run reads it once, one step for warm-up
    for each, fast in ((cold, warm), (large_cold, large_warm)):
        num_tokens = (each["num_steps"] + 1) * each["tokens_per_step"]
        needed.append(each["disk"]["gb"] / num_tokens * fast["tokens_per_second"])
    disk, large_disk = (each["disk"]["gb_per_second"] for each in (cold, large_cold))
    price = 1 - rows["d4096", 2, 2, False, True]["tokens_per_second"] / warm["tokens_per_second"]
    largest = rows["d7168-full", 2, 2, False, False]
    saved, beside = largest["saved"], largest["saved"]["steps_beside_seconds"]
    assert min(beside) <= largest["ms_per_step"] / 1e3 <= max(beside)
    peaks = [
        (max(row["peak_bytes"]) / 2**30, row["estimated_bytes"] / 2**30)
        for row in result["rows"]
        if row["peak_bytes"] is not None
    ]
    assert_holds(
        " ".join(text.split()),
        [
            f"the disk gave {disk:.2f} GB/s (D 4096) and {large_disk:.2f} (D 7168) alone",
            f"use {needed[0]:.2f} and {needed[1]:.2f} GB/s",
            f"would wait for {1 - disk / needed[0]:.0%} of its time".replace("%", " %"),
            f"costs {price:.0%} of tokens/s".replace("%", " %"),
            f"for {price:.0%} of tokens/s".replace("%", " %"),
            f"The head of {largest['num_parameters'] / 1e9:.2f} B parameters",
            f"a save of {saved['num_bytes'] / 1e9:.1f} GB held the steps up for {saved['stall_seconds']:.2f} s "
            f"and was written in {saved['written_seconds']:.1f} s; "
            f"the five steps beside it took {min(beside):.2f} to {max(beside):.2f} s",
            "peaks were {:.1f} GiB where {:.1f} were estimated (D 4096, 1 GPU), {:.1f} and {:.1f} (D 7168, 1 GPU), "
            "{:.1f} and {:.1f} (D 4096, 2 GPUs), all ZeRO-1".format(*(number for pair in peaks for number in pair)),
        ],
    )


def test_memory_of_cases_that_are_alone_is_what_the_json_says() -> None:
    text = training()
    result = result_named_in(text, "benchmarks/results/scaling_memory.json")
    rows = {(row["shape"], row["zero"], row["cold"], row["deterministic"]): row for row in result["rows"]}
    cases = [rows["d7168", 1, False, False], rows["d7168", 2, False, False], rows["d7168-full", 2, False, False]]
    numbers = [number / 2**30 for row in cases for number in (max(row["peak_bytes"]), row["estimated_bytes"])]
    assert_holds(
        " ".join(text.split()),
        [
            "{:.1f} GiB where {:.1f} were estimated (D 7168, 2 GPUs, ZeRO-1), {:.1f} where {:.1f} were (ZeRO-2), and "
            "{:.1f} where {:.1f} were for the head of 1.93 B parameters".format(*numbers)
        ],
    )
    for row in result["rows"]:
        assert max(row["begin_bytes"]) < 0.01 * max(row["peak_bytes"])  # nothing of the cases before
        assert abs(row["estimated_bytes"] / max(row["peak_bytes"]) - 1) < 0.1
