"""The engine that a config names: started, ended, and shown to run the target."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

from eagle3.capture.client import SGLangEngine
from eagle3.capture.engine import Engine
from eagle3.capture.inprocess import TransformersEngine
from eagle3.capture.launch import ServerError, installed_version
from eagle3.capture.server import Server, ServerFacts, capturing_servers
from eagle3.capture.target import Target
from eagle3.config import ExtractConfig, ServerConfig, TargetConfig
from eagle3.features.manifest import digest_target_config, digest_target_weights

logger = logging.getLogger(__name__)


def engine_version(config: ExtractConfig) -> str:
    """Returns the version of the engine that would run, before it does.

    Raises:
        UserError: there is no usable SGLang.
    """
    if config.engine == "transformers":
        return transformers.__version__
    if config.server.urls:
        return Server(config.server.urls[0]).facts().version
    return installed_version(config.server.python or sys.executable)


@contextmanager
def running_engine(config: ExtractConfig, opened: Target) -> Iterator[Engine]:
    """Loads the target into this process, or starts or attaches to the servers that run it.

    Raises:
        UserError: the target cannot be loaded, or a server does not run it as the config says.
    """
    target, layers = config.target, opened.facts.capture_layers
    if config.engine == "transformers":
        yield TransformersEngine(target, layers, opened.tokenizer, batch_tokens=config.batch_tokens)
        return
    server_config = with_target_flags(config.server, target)
    codec = None if config.store.codec == "exact" else config.store.codec
    with capturing_servers(server_config, target.path, layers, codec) as (servers, area):
        engine = SGLangEngine(servers, area, server_config, layers, codec)
        for server, server_facts in zip(servers, engine.server_facts, strict=True):
            check_model(server, server_facts, Path(target.path))
        if engine.facts.dtype != target.dtype:
            raise ServerError(
                f"target.dtype must be the servers', got {target.dtype!r} and states in {engine.facts.dtype} "
                f"({servers[0].url}); start them with --dtype {target.dtype}, or set target.dtype"
            )
        yield engine


def with_target_flags(config: ServerConfig, target: TargetConfig) -> ServerConfig:
    """Adds the flags of a server that the target's settings imply; the config's own win."""
    # By itself SGLang would run fp32 weights in fp16.
    flags: dict[str, Any] = {"dtype": target.dtype, "trust-remote-code": target.trust_remote_code}
    own = {name.replace("_", "-"): value for name, value in config.flags.items()}
    return replace(config, flags={**flags, **own})


def check_model(server: Server, facts: ServerFacts, target_path: Path) -> None:
    """Compares what a server runs with the target's files, as far as the server's are here too.

    Raises:
        ServerError: they differ.
    """
    path = Path(facts.model_path)
    if not (path / "config.json").is_file():
        logger.warning(
            "%s serves %r, whose files are not here: only the parity gates tell that it is the target",
            server.url,
            facts.model_path,
        )
        return
    for what, digest in (("config.json", digest_target_config), ("weights", digest_target_weights)):
        if digest(path) != digest(target_path):
            raise ServerError(
                f"{server.url} must serve the target {str(target_path)!r}, got {facts.model_path!r} with another "
                f"{what}; start it with --model-path {target_path}, or correct target.path"
            )
