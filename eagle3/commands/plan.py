"""`eagle3 plan`: what an extraction or a training would cost, and nothing is run."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from eagle3.cli import check_given_once, command_parser, parse_arguments
from eagle3.config import ExtractConfig, TrainConfig, UserError
from eagle3.config_file import find_config, load_config
from eagle3.loading import loading

EXTRACTION = "default.yaml"  # the config of an extraction where none is named


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0.

    Raises:
        UserError: as the extraction would, before it runs the target, or the training, before it makes a drafter: what
            cannot fit, too.
    """
    parser = command_parser("Says what extract.py would cost with the same arguments, or train.py.", EXTRACTION)
    parser.prog = "python -m eagle3 plan"
    parser.add_argument("--prompts", help="as of extract.py (default: prompts.path of the config)")
    parser.add_argument(
        "--training", metavar="CONFIG", help="plan a training: train.py's YAML file, such as drafter.yaml"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="that train (default: 8)")
    parser.add_argument("--gpu", metavar="NAME", help="what they are (default: H200)")
    arguments = parse_arguments(parser, argv)
    if arguments.training is not None:
        return plan_training(arguments)
    if arguments.gpus is not None or arguments.gpu is not None:
        raise UserError("--gpus and --gpu must come with --training, got an extraction; leave them out")
    config = load_config(ExtractConfig, find_config(arguments.config, "extract"), arguments.overrides)
    if arguments.prompts is not None:
        check_given_once(arguments.overrides, "prompts.path", "--prompts")
        config = replace(config, prompts=replace(config.prompts, path=arguments.prompts))
    with loading():
        from eagle3.capture.planning import read_plan
    plan = read_plan(config)
    print(plan)
    plan.check()
    return 0


def plan_training(arguments: argparse.Namespace) -> int:
    """Prints what a training would take; returns 0.

    Raises:
        UserError: as the training, before it makes a drafter, or the disk cannot take it.
    """
    if arguments.prompts is not None or arguments.config != EXTRACTION:
        raise UserError("--prompts and --config must go with an extraction, got --training; leave them out")
    config = load_config(TrainConfig, find_config(arguments.training, "train", "--training"), arguments.overrides)
    with loading():
        from eagle3.training.planning import read_training_plan
    num_gpus = 8 if arguments.gpus is None else arguments.gpus
    plan = read_training_plan(config, num_gpus=num_gpus, gpu="H200" if arguments.gpu is None else arguments.gpu)
    print(plan)
    plan.check()
    return 0
