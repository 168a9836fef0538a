"""One evaluation: its config checked, done here or against a server, written down."""

import dataclasses
import json
import logging
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from eagle3.board import Board, check_backend, drafter_files
from eagle3.config import EvaluateConfig, UserError, by_dotted_name, config_to_dict
from eagle3.draft.questions import COLUMNS, QUESTIONS_NAME, rows, write_questions
from eagle3.evaluation import serving_charts, serving_report
from eagle3.evaluation.cells import ServingReport
from eagle3.evaluation.doctor.examination import SETTINGS, Examination, examine, show
from eagle3.evaluation.local import prepare_local
from eagle3.evaluation.recorded import ANSWERS_NAME
from eagle3.evaluation.remote import prepare_served
from eagle3.evaluation.report import Report
from eagle3.evaluation.serving import check_serve, check_sglang, prepare_serving
from eagle3.files import write_whole
from eagle3.prompts.rendering import make_renderer
from eagle3.prompts.tokenizers import load_tokenizer
from eagle3.tracking import (
    PROVENANCE_NAME,
    digest_file,
    git_state,
    identify,
    open_board,
    read_provenance,
    write_provenance,
)

logger = logging.getLogger(__name__)

RESULT_NAME = "result.json"


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates, prints the tables, and returns what it writes to OUT/result.json.

    Raises:
        UserError: the settings contradict each other, or something that they name does not fit.
    """
    _check(config)
    check_backend(config.tracking)
    out = Path(config.out)
    read_provenance(out)  # before the work: what is wrong with OUT shows now
    inputs = [Path(path) for path in (config.drafter, config.store) if path is not None]
    # An exported drafter lies in its run's directory.
    identity = identify(out, config.tracking, "evaluate", inputs=[path.parent for path in inputs[:1]] + inputs[1:])
    # What is wrong with what is read shows now, too: an evaluation that cannot be done leaves nothing behind.
    if config.serve is not None:
        reports = prepare_serving(config)
    else:
        work = prepare_local(config) if config.server is None else prepare_served(config)
    for said in (_trained_on(config), _replaced(out / RESULT_NAME)):
        if said is not None:
            logger.warning("%s", said)
    out.mkdir(parents=True, exist_ok=True)
    write_provenance(out, identity, config, _facts(config))
    with open_board(out, config.tracking) as board:
        if config.drafter is not None:
            made_by = identity.inputs[0] if (Path(config.drafter).parent / PROVENANCE_NAME).is_file() else "unknown"
            board.reads(drafter_files(Path(config.drafter), made_by, {}))
        if config.serve is not None:
            return _show_serving(config, reports, board)
        report = work()
        examination = _examine(config) if config.explain else None
        report = dataclasses.replace(report, peak_memory_bytes=_peak_memory_bytes())
        _show_results(board, report)
    result = report.to_dict() | _setting(config)
    if examination is not None:
        result["findings"] += [f"{each.name}: {each.what}; remedy: {each.remedy}" for each in examination.findings]
    write_questions(out / QUESTIONS_NAME, {name: each.questions for name, each in report.measured().items()})
    console = Console()
    report.print(console)
    if examination is not None:
        show(examination, Path(str(config.drafter)), console)
    write_whole(out / RESULT_NAME, json.dumps(result, indent=1) + "\n")
    console.print(f"All figures: {out / RESULT_NAME}", highlight=False, markup=False)
    return result


def _show_serving(config: EvaluateConfig, reports: Iterator[ServingReport], board: Board) -> dict[str, Any]:
    """Measures servers of ours, and writes table, Markdown, page and figures."""
    out, console = Path(config.out), Console()
    setting = _setting(config)
    report = None
    for report in reports:  # written each time, so that what ends it costs a cell and no more
        _write_figures(report, config, setting)
    assert report is not None, "an evaluation yields a report or raises"
    result = _write_pages(report, config, setting)
    serving_report.print_report(report, console)
    for table in serving_report.text_tables(report):
        board.table(table.title, table.headings, table.rows)
    for name in serving_charts.NAMES:
        board.image(f"charts/{name}", out / f"{name}.png")
    accepted = [cell for cell in report.cells if cell.acceptance is not None]
    board.summarise(
        {f"tau/{c.server} T={c.temperature:g} n={c.concurrency}": c.acceptance.tau for c in accepted if c.acceptance}
    )
    console.print(f"Page: {out / 'report.html'}; all figures: {out / RESULT_NAME}", highlight=False, markup=False)
    return result


def _setting(config: EvaluateConfig) -> dict[str, Any]:
    """Returns what the figures depend on besides the engine: settings, code, drafter and template, where they are."""
    found: dict[str, Any] = {"config": config_to_dict(config), "git": git_state()}
    drafter = Path(config.drafter) / "config.json" if config.drafter is not None else None
    if drafter is not None and drafter.is_file():  # with --server it may be on another machine
        found["drafter_config"] = json.loads(drafter.read_text(encoding="utf-8"))
    if config.target is not None and Path(config.target.path).is_dir():
        tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
        found["chat_template_digest"] = make_renderer(tokenizer, config.prompts).template_digest()
    return found


def _write_figures(report: ServingReport, config: EvaluateConfig, setting: dict[str, Any]) -> dict[str, Any]:
    """Writes answers, their counters, and the figures; returns the figures."""
    out = Path(config.out)
    result = serving_report.to_dict(report, config.seed) | setting
    lines = [json.dumps(line) + "\n" for served in report.served for line in served.lines()]
    write_whole(out / ANSWERS_NAME, "".join(lines))
    write_questions(out / QUESTIONS_NAME, report.questions())
    write_whole(out / RESULT_NAME, json.dumps(result, indent=1) + "\n")
    return result


def _write_pages(report: ServingReport, config: EvaluateConfig, setting: dict[str, Any]) -> dict[str, Any]:
    """Writes what people look at, and the figures once more; returns them."""
    out = Path(config.out)
    pictures = serving_charts.draw(report)
    for name, picture in pictures.items():
        (out / f"{name}.png").write_bytes(picture)
    write_whole(out / "report.md", serving_report.markdown(report))
    write_whole(out / "report.html", serving_report.page(report, pictures))
    return _write_figures(report, config, setting)


def _examine(config: EvaluateConfig) -> Examination:
    """Has the doctor look at the drafter."""
    assert config.drafter is not None, "the config was checked"
    return examine(
        Path(config.drafter),
        target_path=Path(config.target.path) if config.target is not None else None,
        store_path=Path(config.store) if config.store is not None else None,
        server=config.server,
        tries_layers=False,
        chat_template_kwargs=config.prompts.chat_template_kwargs,
        spelling=SETTINGS,
    )


def _facts(config: EvaluateConfig) -> dict[str, Any]:
    """Returns what run.json says of an evaluation besides machine and code."""
    files = {
        "prompts": Path(config.prompts.path) if config.prompts.path is not None else None,
        "drafter": Path(config.drafter) / "model.safetensors" if config.drafter is not None else None,
    }
    digests = {name: digest_file(path) for name, path in files.items() if path is not None and path.is_file()}
    return {"seeds": {"evaluation": config.seed}, "digests": digests}


def _show_results(board: Board, report: Report) -> None:
    """Shows the headline figures, the drafter's acceptance per position, and every question."""
    headlines: dict[str, float] = {
        name: value for name, value in report.to_dict().items() if isinstance(value, int | float)
    }
    trained = report.trained.all_answers
    board.log(0, {"tau": trained.tau, "tau_low": trained.low, "tau_high": trained.high, **headlines})
    shares = [(str(index + 1), share) for index, share in enumerate(trained.conditional) if share is not None]
    board.bars("charts/acceptance per position", ("draft position", "accepted, of those reached"), shares)
    table = [row for name, each in report.measured().items() for row in rows(name, each.questions)]
    board.table("questions", COLUMNS, table)


def _check(config: EvaluateConfig) -> None:
    """Refuses settings that cannot work together, all at once."""
    problems = []
    if config.serve is not None:
        problems = check_serve(config.serve) + check_sglang(config.serve.server) + serving_charts.check_pictures()
    if config.serve is not None and (config.server is not None or config.explain or config.store is not None):
        problems.append("serve must be null with server, store or explain, got both; it starts servers of its own")
    if config.server is None and config.target is None:
        problems.append("target.path must name the target, got none; set it, or evaluate a server with --server URL")
    if config.drafter is None and (config.server is None or config.store is not None):
        problems.append("drafter must name a directory in SGLang's format, got null; set it, e.g. drafter=RUN/drafter")
    if config.explain and config.drafter is None:
        problems.append("drafter must name a directory with explain=true, got null; set it, or leave explain out")
    if config.server is not None and config.store is not None and config.target is None:
        problems.append("target.path must name the target to simulate over a store, got none; set it")
    if config.server is not None and config.compare_untrained:
        problems.append("compare_untrained must be false with --server, got true; the server has one drafter")
    at_least_one = {
        "speculation.num_draft_tokens": config.speculation.num_draft_tokens,
        "batch_size": config.batch_size,
    }
    if config.max_prompts is not None:
        at_least_one["max_prompts"] = config.max_prompts
    problems += [f"{name} must be 1 or more, got {value}" for name, value in at_least_one.items() if value < 1]
    for name, value, default in (
        ("too_long", config.prompts.too_long, "drop"),
        ("train_on", config.prompts.train_on, "all"),
    ):
        if value != default:
            problems.append(
                f"prompts.{name} must be {default!r} in an evaluation, got {value!r}; it is for given answers, and the "
                f"target writes its own here"
            )
    if config.max_new_tokens < 2:
        problems.append(
            f"max_new_tokens must be 2 or more, got {config.max_new_tokens}; the first token comes from prefill, and "
            f"only the others take rounds"
        )
    if not 0 <= config.seed < 2**63:
        problems.append(f"seed must be from 0 to below 2**63, got {config.seed}")
    if config.timed_prompts < 0:
        problems.append(f"timed_prompts must be 0 or more, got {config.timed_prompts}")
    if config.held_out_share is not None and not 0 < config.held_out_share <= 1:
        problems.append(f"held_out_share must be above 0 and at most 1, got {config.held_out_share}; null takes all")
    if problems:
        raise UserError("\n".join(problems))


def _trained_on(config: EvaluateConfig) -> str | None:
    """Says it where the drafter's own run trained on prompts that are asked."""
    if config.drafter is None or config.held_out_share is None:
        return None
    directory = Path(config.drafter).parent
    sessions = [each for each in read_provenance(directory)["sessions"] if each["run"]["job_type"] == "train"]
    settings = sessions[-1].get("config") if sessions else None
    share = by_dotted_name(settings).get("data.held_out_share") if isinstance(settings, dict) else None
    if not isinstance(share, int | float) or config.held_out_share <= share:
        return None  # a smaller share is a part of the larger one
    return (
        f"held_out_share is {config.held_out_share:g}, and the drafter's training held out {share:g} "
        f"({directory / PROVENANCE_NAME}): of its own prompts, some that it was trained on are asked"
    )


def _replaced(result: Path) -> str | None:
    """Says it where figures of an earlier evaluation will be written over."""
    if not result.is_file():
        return None
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result.stat().st_mtime))
    return f"the figures that an evaluation wrote {written} will be replaced ({result}); to keep them, name another out"


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts kibibytes
