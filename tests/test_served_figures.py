"""Every figure in docs/EXPERIMENTS.md on served and simulated acceptance is the one in the JSON that it names."""

from typing import Any

from figures import assert_holds, experiments, readme, result_named_in

SERVED = "benchmarks/results/served.json"
SERVED_7 = "benchmarks/results/served_7.json"
SIMULATE = "benchmarks/results/simulate.json"


def served_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of docs/EXPERIMENTS.md that hold what a server counted, and what was simulated beside it."""
    lines = []
    for row in result["simulated"]["rows"]:
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
    text = experiments()
    result = result_named_in(text, SERVED)
    assert SERVED in readme()
    assert_holds(text, served_lines(result))
    pairs = [(row["served"]["tau"], row["simulated"]["tau"]) for row in result["simulated"]["rows"]]
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
    text = experiments()
    result = result_named_in(text, SERVED_7)
    assert SERVED_7 in readme()
    lines = chain_7_lines(result)
    assert len(lines) == 2 * (5 + 1) + 2 * 4
    assert_holds(text, lines)
    for cell in result["cells"]:
        for name, simulated in (cell["simulated_by_set"] or {}).items():
            assert abs(simulated["tau"] / cell["by_set"][name]["tau"] - 1) < 0.003, (name, cell["temperature"])
    (agreement,) = result["agreements"]
    assert f"{agreement['num_equal']} of {agreement['num_answers']} answers" in text


def test_the_simulators_speed_is_that_of_the_json() -> None:
    text = experiments()
    result = result_named_in(text, SIMULATE)
    for row in result["rows"]:
        assert f"| {row['setting']} | {row['seconds']:.2f} | {row['tokens_per_second']:,.0f} |" in text
    assert f"{result['rows'][0]['tokens_per_second'] / 1e6:.1f} M tokens/s" in readme()
