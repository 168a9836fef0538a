"""Feature store -> drafter."""

from eagle3.loading import loading

with loading():
    from eagle3.cli import command_parser, follow_launcher, parse_arguments, run_command
    from eagle3.config import ExtractConfig, TrainConfig
    from eagle3.config_file import find_config, load_config


def main() -> None:
    follow_launcher()
    parser = command_parser("Trains a drafter on a feature store; start it with `accelerate launch`.", "drafter.yaml")
    arguments = parse_arguments(parser)
    config = load_config(TrainConfig, find_config(arguments.config, "train"), arguments.overrides)
    with loading():
        from eagle3.training.trainer import train
    if not config.data.is_streamed:
        train(config)
        return
    with loading():
        from eagle3.capture.streaming import streamed_samples, within_timeout
        from eagle3.training.distributed import quiet_other_ranks
    quiet_other_ranks()
    extraction = load_config(ExtractConfig, find_config(config.data.path, "extract", "data.path"), [])
    with streamed_samples(within_timeout(extraction, config.run.timeout), config.data.path) as samples:
        train(config, samples)


if __name__ == "__main__":
    run_command(main)
