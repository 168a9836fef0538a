"""Prompts -> feature store."""

from eagle3.loading import loading

with loading():
    from dataclasses import replace

    from eagle3.cli import check_given_once, command_parser, parse_arguments, run_command
    from eagle3.config import ExtractConfig
    from eagle3.config_file import find_config, load_config


def main() -> None:
    parser = command_parser("Captures a target's hidden states on prompts, and the target's answers.", "default.yaml")
    parser.add_argument(
        "--prompts", help="a file, a glob, a folder, or hf:OWNER/NAME (default: prompts.path of the config)"
    )
    parser.add_argument(
        "--answers-only", action="store_true", help="store no states: a training has them made while it runs"
    )
    arguments = parse_arguments(parser)
    config = load_config(ExtractConfig, find_config(arguments.config, "extract"), arguments.overrides)
    if arguments.prompts is not None:
        check_given_once(arguments.overrides, "prompts.path", "--prompts")
        config = replace(config, prompts=replace(config.prompts, path=arguments.prompts))
    with loading():
        from eagle3.capture.answering import write_answers
        from eagle3.capture.extraction import run_extraction
    if arguments.answers_only:
        write_answers(config)
    else:
        run_extraction(config)


if __name__ == "__main__":
    run_command(main)
