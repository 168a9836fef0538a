"""Every figure in the README is the one in the JSON that it names."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from rich.console import Console

from eagle3.evaluation.compare import show
from eagle3.evaluation.tables import TextTable

ROOT = Path(__file__).resolve().parent.parent
DEMO = "benchmarks/results/demo.json"
CODEC_ERRORS = "benchmarks/results/codec_errors.json"
TRAIN = "benchmarks/results/train.json"
LOSS_CURVES = "benchmarks/results/loss_curves.json"
DROP_REJECTED = "benchmarks/results/drop_rejected.json"
ATTENTION = "benchmarks/results/attention.json"
PROMPTS = "benchmarks/results/prompts.json"
COMPARE = "benchmarks/results/compare.json"
SERVED = "benchmarks/results/served.json"
SERVED_7 = "benchmarks/results/served_7.json"
WRITER = "benchmarks/results/writer.json"
CAPTURE = "benchmarks/results/capture.json"
SIMULATE = "benchmarks/results/simulate.json"


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def demo_lines(result: dict[str, Any]) -> list[str]:
    """Returns the README's lines that hold figures of the demo."""
    rows = {
        "untrained: the target's head and norm": "untrained",
        "trained": "trained",
        "trained, simulated on the same answers": "simulated",
    }
    lines = []
    for title, name in rows.items():
        all_answers = result[name]["all_answers"]
        lines.append(
            f"| {title} | {all_answers['tau']:.2f} | {all_answers['low']:.2f} to {all_answers['high']:.2f} "
            f"| {all_answers['tau_without_prefill']:.2f} |"
        )
    lines.append(
        f"Its stages took at most {result['peak_memory_bytes'] / 2**30:.1f} GiB; one stream decoded "
        f"{result['tokens_per_second_plain']:.1f} tokens/s plain and"
    )
    lines.append(f"{result['tokens_per_second_speculative']:.1f} with the drafter.")
    return lines


def test_demo_figures_are_those_of_the_json() -> None:
    result = json.loads((ROOT / DEMO).read_text(encoding="utf-8"))
    text = readme()
    assert DEMO in text
    assert f"commit {result['commit'][:7]}" in text
    for line in demo_lines(result):
        assert line in text, f"README.md must have the line {line!r}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}".replace("%", " %")


def train_lines(result: dict[str, Any]) -> list[str]:
    """Returns the README's lines that hold figures of the training engine: speed, then where the time goes."""
    lines = []
    for row in result["rows"]:
        shares = [row["share_of_limit"], row["multiplied_share_of_limit"], row["attention_share_of_limit"]]
        lines.append(
            f"| `{row['work']}` | {row['tokens']:,} | {row['ms_per_step']:.0f} | {row['tokens_per_second']:,.0f} | "
            + " | ".join(percent(share) for share in shares)
            + f" | {row['peak_gib']:.1f} |"
        )
    for row in result["rows"]:
        stages = dict(row["stages_ms"])
        columns = [stages.pop(stage) for stage in ("matrix products", "attention over the context", "head scores")]
        columns += [stages.pop("optimizer and clipping"), stages.pop("everything else"), sum(stages.values())]
        lines.append(f"| `{row['work']}` | " + " | ".join(f"{milliseconds:.1f}" for milliseconds in columns) + " |")
    return lines


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
    result = json.loads((ROOT / LOSS_CURVES).read_text(encoding="utf-8"))
    text = (ROOT / "docs/EXPERIMENTS.md").read_text(encoding="utf-8")
    assert LOSS_CURVES in text
    assert "![" in text
    assert (ROOT / "docs/loss_curves.png").exists()
    for line in curve_lines(result):
        assert line in text, f"docs/EXPERIMENTS.md must have the line {line!r}"
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


def test_training_figures_are_those_of_the_json() -> None:
    result = json.loads((ROOT / TRAIN).read_text(encoding="utf-8"))
    text = readme()
    assert TRAIN in text
    assert f"commit {result['commit'][:7]}" in text
    for line in train_lines(result):
        assert line in text, f"README.md must have the line {line!r}"


def test_the_comparison_is_what_the_command_printed() -> None:
    result = json.loads((ROOT / COMPARE).read_text(encoding="utf-8"))
    text = readme()
    assert COMPARE in text
    assert f"commit {result['commit'][:7]}" in text
    console = Console(file=io.StringIO(), width=118)
    show([TextTable(**table) for table in result["tables"]], result["sentences"], console)
    assert isinstance(console.file, io.StringIO)
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert "\n".join(printed) in text


def test_every_result_named_in_the_readme_exists_and_says_how_it_was_made() -> None:
    named = set(re.findall(r"benchmarks/results/[\w.-]+\.json", readme()))
    assert named
    for name in named:
        result = json.loads((ROOT / name).read_text(encoding="utf-8"))
        missing = {"command", "date", "commit", "hardware", "versions"} - result.keys()
        assert not missing, f"{name} must say {sorted(missing)}"


def test_prompt_figures_are_those_of_the_json() -> None:
    result = json.loads((ROOT / PROMPTS).read_text(encoding="utf-8"))
    resident = result["resident_mib_after_each_tenth"]
    text = readme()
    assert f"On {result['hardware']} (commit {result['commit'][:7]}, {result['date']}" in text
    for line in (
        f"{result['rows']:,} rows of\n{result['mean_tokens']:.0f} tokens",
        f"at {result['rows_per_second']:,} rows/s",
        f"held {resident[0]:,.0f} MiB after the first tenth and {resident[-1]:,.0f} at the end",
    ):
        assert line in text, f"README.md must have {line!r}"


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
        f"| {row['work']} | a process beside it | {result['commit'][:7]} | {row['num_requests']}, {row['num_pairs']} "
        f"| {row['plain_tokens_per_second']:,.0f} | {row['recorded_tokens_per_second']:,.0f} "
        f"| {100 * row['overhead']:.1f} %, {100 * row['overhead_low']:.1f} to {100 * row['overhead_high']:.1f} |"
        for row in result["rows"]
    ]


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
    ],
)
def test_figures_of_the_experiments_are_those_of_the_json(
    name: str, lines_of: Callable[[dict[str, Any]], list[str]]
) -> None:
    result = json.loads((ROOT / name).read_text(encoding="utf-8"))
    text = (ROOT / "docs/EXPERIMENTS.md").read_text(encoding="utf-8")
    assert name in text
    assert f"commit {result['commit'][:7]}" in text
    for line in lines_of(result):
        assert line in text, f"docs/EXPERIMENTS.md must have the line {line!r}"


def test_codec_errors_are_those_of_the_json() -> None:
    result = json.loads((ROOT / CODEC_ERRORS).read_text(encoding="utf-8"))
    text = (ROOT / "docs/EXPERIMENTS.md").read_text(encoding="utf-8")
    assert CODEC_ERRORS in text
    assert f"commit {result['commit'][:7]}" in text
    for row in result["errors"]:
        first = "-" if row["of_typical_first_token"] is None else f"{row['of_typical_first_token']:.2%}"
        line = (
            f"| {row['codec']} | {row['state']} | {row['of_length']:.2%} | {row['of_typical']:.2%} | {first} "
            f"| {row['worst_channel']:.2%} |"
        ).replace("%", " %")
        assert line in text, f"docs/EXPERIMENTS.md must have the line {line!r}"


def served_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that hold what a server counted, and what was simulated beside it."""
    lines = []
    for row in result["simulated"]["rows"]:
        if row["served"] is not None:
            served, simulated = row["served"], row["simulated"]
            lines.append(
                f"| {row['set']} | {row['temperature']:g} | {simulated['num_answers']} | {simulated['num_tokens']:,} "
                f"| {served['tau']:.4f} | {simulated['tau']:.4f} | {simulated['tau'] / served['tau'] - 1:+.2%} |"
            )
    for cell in result["cells"]:
        lines.append(
            f"| {cell['concurrency']} | {cell['temperature']:g} | {cell['num_answers']} "
            f"| {cell['tokens_per_second']:,.0f} | {cell['latency_mean']:.2f} | {cell['acceptance']['tau']:.3f} |"
        )
    return lines


def test_served_and_simulated_figures_are_those_of_the_json() -> None:
    result = json.loads((ROOT / SERVED).read_text(encoding="utf-8"))
    text = (ROOT / "docs/EXPERIMENTS.md").read_text(encoding="utf-8")
    assert SERVED in text
    assert SERVED in readme()
    assert f"commit {result['commit'][:7]}" in text
    for line in served_lines(result):
        assert line in text, f"docs/EXPERIMENTS.md must have the line {line!r}"
    pairs = [(row["served"]["tau"], row["simulated"]["tau"]) for row in result["simulated"]["rows"] if row["served"]]
    assert len(pairs) == 2 * (5 + 1)
    assert max(abs(simulated / served - 1) for served, simulated in pairs) < 0.002
    # The first cells are the answers that were simulated.
    for cell in result["cells"]:
        if cell["concurrency"] == 16:
            for name, counted in (cell["by_set"] | {"all": cell["acceptance"]}).items():
                (row,) = [
                    row
                    for row in result["simulated"]["rows"]
                    if (row["set"], row["temperature"], row["speculation"]) == (name, cell["temperature"], "3")
                ]
                assert row["served"]["tau"] == counted["tau"], name


def chain_7_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md on chains of 7: acceptance counted and simulated, then speed."""
    lines = []
    for cell in result["cells"]:
        if cell["simulated"] is not None:
            pairs = {"all": (cell["acceptance"], cell["simulated"])}
            pairs |= {name: (cell["by_set"][name], tau) for name, tau in cell["simulated_by_set"].items()}
            lines += [
                f"| {name} | {cell['temperature']:g} | {served['num_tokens']:,} | {served['tau']:.4f} "
                f"| {simulated['tau']:.4f} | {simulated['tau'] / served['tau'] - 1:+.2%} |"
                for name, (served, simulated) in pairs.items()
            ]
    plain = {(c["concurrency"], c["temperature"]): c for c in result["cells"] if c["server"] == "plain"}
    for cell in result["cells"]:
        if cell["server"] == "7":
            alone = plain[cell["concurrency"], cell["temperature"]]
            lines.append(
                f"| {cell['concurrency']} | {cell['temperature']:g} | {alone['tokens_per_second']:,.0f} "
                f"| {cell['tokens_per_second']:,.0f} | {cell['speed_up']:.2f} | {alone['latency_mean']:.2f} "
                f"| {cell['latency_mean']:.2f} |"
            )
    return lines


def test_figures_of_chains_of_7_are_those_of_the_json() -> None:
    result = json.loads((ROOT / SERVED_7).read_text(encoding="utf-8"))
    text = (ROOT / "docs/EXPERIMENTS.md").read_text(encoding="utf-8")
    assert SERVED_7 in text
    assert SERVED_7 in readme()
    assert f"commit {result['commit'][:7]}" in text
    lines = chain_7_lines(result)
    assert len(lines) == 2 * (5 + 1) + 2 * 4
    for line in lines:
        assert line in text, f"docs/EXPERIMENTS.md must have the line {line!r}"
    for cell in result["cells"]:
        for name, simulated in (cell["simulated_by_set"] or {}).items():
            assert abs(simulated["tau"] / cell["by_set"][name]["tau"] - 1) < 0.003, (name, cell["temperature"])
    (agreement,) = result["agreements"]
    assert f"{agreement['num_equal']} of {agreement['num_answers']} answers" in text


def test_what_an_fsync_per_shard_costs_is_what_the_json_says() -> None:
    result = json.loads((ROOT / WRITER).read_text(encoding="utf-8"))
    text = (ROOT / "docs/EXPERIMENTS.md").read_text(encoding="utf-8")
    assert WRITER in text
    assert f"commit {result['commit'][:7]}" in text
    writer = result["writer"]
    shares = [once / each - 1 for each, once in zip(*writer["seconds"].values(), strict=True)]
    assert f"{-median(shares):.0%} of its throughput".replace("%", " %") in text
    assert 1 - writer["share_of_synced_once"] == pytest.approx(-median(shares))


def test_the_simulators_speed_is_that_of_the_json() -> None:
    result = json.loads((ROOT / SIMULATE).read_text(encoding="utf-8"))
    text = (ROOT / "docs/EXPERIMENTS.md").read_text(encoding="utf-8")
    assert SIMULATE in text
    for row in result["rows"]:
        assert f"| {row['setting']} | {row['seconds']:.2f} | {row['tokens_per_second']:,.0f} |" in text
    assert f"{result['rows'][0]['tokens_per_second'] / 1e6:.1f} M tokens/s" in readme()
