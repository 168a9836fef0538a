"""Every figure in the README is the one in the JSON that it names."""

import io
import json
import re
from typing import Any

from figures import ROOT, assert_holds, percent, readme, result_named_in
from rich.console import Console

from eagle3.evaluation.compare import show
from eagle3.evaluation.tables import TextTable

DEMO = "benchmarks/results/demo.json"
TRAIN = "benchmarks/results/train.json"
LOSS_CURVES = "benchmarks/results/loss_curves.json"
PROMPTS = "benchmarks/results/prompts.json"
COMPARE = "benchmarks/results/compare.json"
VLLM = "benchmarks/results/vllm.json"


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
    seconds = [f"{result['wall_seconds'][name]:.0f}" for name in ("extract", "train", "evaluate")]
    lines.append(
        f"Extraction, training and evaluation took {seconds[0]}, {seconds[1]} and {seconds[2]} s on a quiet machine"
    )
    lines.append(
        f"and at most {result['peak_memory_bytes'] / 2**30:.1f} GiB; one stream decoded "
        f"{result['tokens_per_second_plain']:.1f} tokens/s plain and"
    )
    lines.append(f"{result['tokens_per_second_speculative']:.1f} with the drafter.")
    return lines


def test_demo_figures_are_those_of_the_json() -> None:
    text = readme()
    result = result_named_in(text, DEMO)
    assert_holds(text, demo_lines(result))


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


def test_training_figures_are_those_of_the_json() -> None:
    text = readme()
    result = result_named_in(text, TRAIN)
    assert_holds(text, train_lines(result))


def product_rate(row: dict[str, Any]) -> float:
    """Returns the TFLOP/s of a step's matrix products: what was multiplied but for the attention of all rows."""
    shape, seconds = row["shape"], row["ms_per_step"] / 1e3
    attention = 7 * 7 * row["tokens"] ** 2 / row["documents"] * shape["num_heads"] * shape["head_dim"]
    multiplied = row["multiplied_share_of_limit"] * 989e12 * seconds
    return (multiplied - attention) / (row["stages_ms"]["matrix products"] / 1e3) / 1e12


def test_sentences_on_training_follow_from_the_json() -> None:
    rows = {row["work"]: row for row in json.loads((ROOT / TRAIN).read_text(encoding="utf-8"))["rows"]}
    curves = json.loads((ROOT / LOSS_CURVES).read_text(encoding="utf-8"))
    rates = [product_rate(row) for row in rows.values() if row["share_of_limit"] is not None]
    corpus = rows["d4096-corpus"]
    mean = corpus["tokens"] / corpus["documents"]
    differences = curves["largest_difference"]
    dense, fp32, bf16 = (curves["runs"][name]["tau"] for name in ("dense, fp32", "engine, fp32", "engine, bf16"))
    text = readme()
    for words in (
        f"{corpus['documents']} documents of 86 to 2,636 tokens, {mean:.0f} on average",
        f"Matrix products run at {min(rates):.0f} to {max(rates):.0f} TFLOP/s",
        f"fp32 within {differences['engine, fp32']:.3%}".replace("%", " %"),
        f"bf16 within\n{differences['engine, bf16']:.1%}".replace("%", " %"),
        f"held-out tau {dense:.3f} by the definition, {fp32:.3f} and {bf16:.3f} by the engine",
    ):
        assert words in text, f"README.md must have {words!r}"


def test_the_comparison_is_what_the_command_printed() -> None:
    text = readme()
    result = result_named_in(text, COMPARE)
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


def test_what_vllm_accepted_is_what_the_json_says() -> None:
    result = json.loads((ROOT / VLLM).read_text(encoding="utf-8"))
    assert f"commit {result['commit'][:7]}, {result['date']}; `{VLLM}`" in readme()
    for row in result["rows"]:
        assert f"| {row['served']} | {row['num_tokens']:,} | {row['rounds']:.0f} | {row['tau']:.3f} |" in readme()
    served_four, served_one, decoded, without = (row["rounds"] for row in result["rows"])
    assert served_four == served_one == decoded < without
    assert all(row["rounds_vllm"] == row["rounds_decoder"] for row in result["other_drafters"])


def test_what_recording_costs_is_what_the_json_says() -> None:
    text = readme()
    result = result_named_in(text, "benchmarks/results/capture.json")
    names = {"deepseek-v3": "DeepSeek-V3's shape, 16 layers", "smollm2": "SmolLM2-135M's shape"}
    rows = [row for row in result["rows"] if "chunked-prefill-size" not in row["flags"]]
    assert len(rows) == 2
    assert_holds(
        text,
        [
            f"| {names[row['work']]} | {row['bytes_per_round'] // (row['num_requests'] * row['tokens_per_request']):,} "
            f"| {row['plain_tokens_per_second']:,.0f} | {row['recorded_tokens_per_second']:,.0f} "
            f"| {100 * row['overhead']:.1f} % | {100 * row['overhead_low']:.1f} to {100 * row['overhead_high']:.1f} |"
            for row in rows
        ],
    )
