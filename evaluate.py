"""Drafter -> acceptance on a served target."""

from eagle3.loading import loading

with loading():
    from eagle3.cli import command_parser, parse_arguments, run_command
    from eagle3.config import EvaluateConfig
    from eagle3.config_file import find_config, load_config


def main() -> None:
    parser = command_parser("Measures a drafter's acceptance length and speed.", "default.yaml")
    parser.add_argument("--server", metavar="URL", help="a running SGLang or vLLM server with the drafter on")
    arguments = parse_arguments(parser)
    overrides = arguments.overrides
    if arguments.server is not None:
        overrides = [*overrides, f"server={arguments.server}"]
    config = load_config(EvaluateConfig, find_config(arguments.config, "evaluate"), overrides)
    with loading():
        from eagle3.evaluation.run import evaluate
    evaluate(config)


if __name__ == "__main__":
    run_command(main)
