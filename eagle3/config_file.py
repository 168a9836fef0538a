"""A YAML file and `section.field=value` overrides -> a config.

What is unknown, mistyped or missing is refused, with all problems of the file and the overrides in one message.
"""

import dataclasses
import difflib
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from eagle3.config import DeepSpeedFile, EvaluateConfig, ExtractConfig, InspectConfig, TrainConfig, UserError, Written
from eagle3.words import counted

CONFIG_ROOT = Path(__file__).resolve().parent.parent / "configs"

Config = TypeVar("Config", ExtractConfig, TrainConfig, EvaluateConfig, InspectConfig)


def find_config(name: str, command: str, setting: str = "--config") -> Path:
    """Returns the path of a config that a setting names: as typed, else under `configs/<command>/`.

    Raises:
        UserError: neither exists; the message lists what `configs/<command>/` has.
    """
    shipped = CONFIG_ROOT / command
    for path in (Path(name), shipped / name, shipped / f"{name}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.name for path in shipped.glob("*.yaml")))
    raise UserError(f"{setting} must be a file, got {name!r} (not found as typed, nor among {shipped}: {known})")


def find_deepspeed(name: str) -> Path | None:
    """Returns the DeepSpeed JSON that is meant, as typed, else under `configs/deepspeed/`; None if there is none."""
    shipped = CONFIG_ROOT / "deepspeed"
    return next((path for path in (Path(name), shipped / name, shipped / f"{name}.json") if path.is_file()), None)


def load_config(cls: type[Config], path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Builds a config from a YAML file and `section.field=value` overrides; the overrides win.

    Raises:
        UserError: every unknown, mistyped or missing setting of the file and the overrides, in one message.
    """
    problems: list[str] = []
    settings = _read_yaml(path) if path is not None else {}
    given: dict[str, str] = {}
    for override in overrides:
        name = override.partition("=")[0]
        if name in given:
            problems.append(f"  {name} must be given once, got {given[name]!r} and {override!r}; leave one away")
        given[name] = override
        _apply_override(settings, override, problems)
    config = _build(cls, settings, "", problems)
    if problems:
        sources = [str(path)] if path is not None else []
        if overrides or not sources:
            sources.append("the command line")
        source = " and ".join(sources)
        raise UserError("\n".join([f"{counted(len(problems), 'problem')} in the settings ({source}):", *problems]))
    return config


class _Loader(yaml.SafeLoader):
    """Reads as text what YAML 1.1 takes for dates, base 60 and octals: names look like them, no number does.

    A setting that comes twice is refused, where YAML takes the last one.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, name in enumerate(names):
            if name in names[:index] and name != "<<":
                raise yaml.constructor.ConstructorError(problem=f"{name} comes twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"(?:[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9]+([eE][-+][0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = _parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # not YAML, not UTF-8, or a number past Python's limits
        raise UserError(f"config must be YAML in UTF-8, got {path}: {error}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UserError(f"config must be a mapping of settings, got {type(settings).__name__} ({path})")
    return settings


def _apply_override(settings: dict[str, Any], override: str, problems: list[str]) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        problems.append(f"  an override must be section.field=value, got {override!r}; see --help for options")
        return
    *sections, last = name.split(".")
    for section in sections:
        if not isinstance(settings.get(section), dict):
            settings[section] = {}
        settings = settings[section]
    try:
        settings[last] = _parse_yaml(text)
    except (yaml.YAMLError, ValueError):
        settings[last] = text  # a bare string that YAML would read as syntax, such as a path with a colon


def _build(cls: type[Any], settings: Any, where: str, problems: list[str]) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(settings, dict):
        known = ", ".join(where + name for name in fields)
        problems.append(f"  {where.rstrip('.')} must be a mapping of settings, got {settings!r}; known here: {known}")
        return None
    hints = get_type_hints(cls, include_extras=True)
    for name in settings:
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            advice = f"did you mean {where}{close[0]}?" if close else f"known here: {', '.join(fields)}"
            problems.append(f"  {where}{name} is not a setting; {advice}")
    values = {}
    for name, item in fields.items():
        if name in settings:
            values[name] = _convert(hints[name], settings[name], where + name, problems)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            problems.append(f"  {where}{name} is required ({_describe(hints[name])})")
    return cls(**values) if not problems else None


def _convert(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Returns `value` as `hint` says, or notes the problem; ints become floats, nothing else changes kind."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, where + ".", problems)
    if hint == Written:
        if isinstance(value, str) and "://" in value:
            problems.append(f"  {where} must be a directory: nothing is written to URLs, got {value!r}")
            return None
        hint = str
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return _convert(inner, value, where, problems)
    if origin is Literal:
        # YAML reads a bare no/yes/on/off as a bool; the names win where they are meant.
        if isinstance(value, bool):
            value = {False: "no", True: "yes"}[value]
        if value in arguments:
            return value
    elif origin is list and isinstance(value, list):
        return [_convert(arguments[0], entry, f"{where}[{i}]", problems) for i, entry in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return value
    elif hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        # PyYAML reads 1e-4 as a string: YAML 1.1 wants the dot of 1.0e-4.
        try:
            return float(value)
        except ValueError:
            pass
    elif hint is DeepSpeedFile and isinstance(value, str) and find_deepspeed(value) is not None:
        return value
    elif hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    elif origin is None and isinstance(hint, type) and type(value) is hint:
        return value
    problems.append(f"  {where} must be {_describe(hint)}, got {value!r}")
    return None


def _describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _describe(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in arguments)
    if origin is Literal:
        return "one of " + ", ".join(repr(argument) for argument in arguments)
    if hint is DeepSpeedFile:
        shipped = sorted(path.stem for path in (CONFIG_ROOT / "deepspeed").glob("*.json"))
        return f"{', '.join(map(repr, shipped))} or the path of a DeepSpeed JSON"
    if origin is list:
        return f"a list, each {_describe(arguments[0])}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a mapping"
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}[hint]
