"""Flags of settings, made from the fields of the config, and how a command gets further options.

A field's description is its help text and its bounds are checked by the config: nothing is said
twice. A field that is a model of its own is one flag, `--NAME-config`, with JSON for a value.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from cluster.config import RENAMED, ClusterConfig, ConfigError
from cluster.config_sources import ALIASES, from_args, from_file, is_null, overridden
from cluster.error_messages import joined
from scheduler.simulation import parse_lengths

Command = Callable[..., None]
ENGINE = ("replica", "scheduler")
PARSERS = ("frontend.reasoning_parser", "frontend.tool_call_parser")
"""Settings that other servers have by the same flags."""
"""Sections of the config that say how one replica computes."""
_FILES = ("keys_file", "chat_template")
_METAVARS = {int: "N", float: "X", ByteSize: "SIZE"}


@dataclass(frozen=True)
class Flag:
    """A setting as an option."""

    section: str
    """Empty for settings that stand at the top."""
    field: str
    name: str
    info: FieldInfo

    @property
    def path(self) -> str:
        return f"{self.section}.{self.field}" if self.section else self.field

    def parameter(self) -> inspect.Parameter:
        """What typer makes the option from; None where it is not given."""
        type_ = type_of(self.info)
        kind: Any = str
        names = [self.name]
        if self.path in ALIASES:
            names.append("--" + ALIASES[self.path].replace("_", "-"))
        metavar: str | None = self._metavar()
        if type_ is bool:
            kind, names, metavar = bool, [f"{self.name}/--no-{self.name.removeprefix('--')}"], None
        panel = f"Settings of the {self.section or 'cluster'}"
        option = typer.Option(*names, help=self.help(), rich_help_panel=panel, metavar=metavar)
        return keyword(self.path.replace(".", "_"), Annotated[kind | None, option])

    def value(self, text: Any) -> Any:
        """The setting's value; what its field says of it is checked with all others.

        Raises ConfigError for JSON that is none.
        """
        if not isinstance(text, str):
            return text
        if is_null(self.field, text):
            return None
        method = self._names_a_method and not text.lstrip().startswith("{")
        if model_of(self.info) is not None and not method:
            try:
                return json.loads(text)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{self.name}: not JSON: {error}") from None
        if get_origin(type_of(self.info)) is tuple:
            return [part.strip() for part in text.split(",") if part.strip()]
        # A server is another process, with another working directory.
        return str(Path(text).resolve()) if self.field in _FILES else text

    @property
    def _names_a_method(self) -> bool:
        """Whether it is JSON or a method alone, which the config tells apart."""
        model = model_of(self.info)
        return model is not None and "method" in model.model_fields

    def _metavar(self) -> str:
        type_ = type_of(self.info)
        if get_origin(type_) is Literal:
            return "|".join(map(str, get_args(type_)))
        if get_origin(type_) is tuple:
            return "A,B"
        if model_of(self.info) is not None:
            return "METHOD|JSON" if self._names_a_method else "JSON"
        return _METAVARS.get(type_, "TEXT")

    def help(self) -> str:
        model, default = model_of(self.info), self.info.get_default(call_default_factory=True)
        said = self.info.description or (inspect.getdoc(model) or "" if model else "")
        said = " ".join(said.split("\n\n")[0].split())
        facts = [] if type_of(self.info) is ByteSize else [_bounds(self.info)]
        if default not in (None, ()) and model is None:
            shown = str(default).lower() if isinstance(default, bool) else default
            facts.append(f"default {shown}")
        listed = "; ".join(filter(None, facts))
        return f"{said} [{listed}]" if listed else said


def flags_of(sections: Sequence[str]) -> list[Flag]:
    """A flag for each field of these sections, or of one field, as "scheduler.rows_max"; ""
    stands for the top of the config.

    At the top the other sections are flags, too.
    """
    flags = []
    for place in sections:
        section, _, only = place.partition(".")
        model = model_of(ClusterConfig.model_fields[section]) if section else ClusterConfig
        assert model is not None, f"{section} is no section"
        for field, info in model.model_fields.items():
            if (only and field != only) or (not section and field in sections):
                continue
            name = field.replace("_", "-")
            if model_of(info) is not None:
                name = name.removesuffix("-config") + "-config"
            flags.append(Flag(section, field, f"--{name}", info))
    return flags


def with_settings(*sections: str, model: bool = False) -> Callable[[Command], Command]:
    """A command that gets its `settings`, a ClusterConfig, by flags and by --config; with `model`
    the target may be its argument, too.

    An option of the command's own goes before a setting's of the same name.
    """
    flags = flags_of(sections)
    file = typer.Option(
        help="YAML file of settings, or a Serve config file. Flags override it.",
        exists=True,
        dir_okay=False,
    )

    def settings(options: dict[str, Any]) -> ClusterConfig:
        path, target = options.pop("config"), options.pop("model", None)
        given = {flag: options[name] for flag, name in names if options.get(name) is not None}
        try:
            nested: dict[str, Any] = {}
            for flag, text in given.items():
                place = nested.setdefault(flag.section, {}) if flag.section else nested
                place[flag.field] = flag.value(text)
            if target is not None:
                nested.setdefault("replica", {})["target"] = target
            return overridden(from_file(path), nested) if path else from_args(nested)
        except (ConfigError, OSError) as error:
            raise typer.BadParameter(_named_by_flags(error, list(given))) from None

    def decorate(command: Command) -> Command:
        own = _options(command)
        target = typer.Argument(help="The target, as --target.")
        added = [keyword("model", Annotated[str | None, target])] if model else []
        added.append(keyword("config", Annotated[Path | None, file]))
        added += [flag.parameter() for flag in flags if flag.name not in own]
        taken = own | {flag.name for flag in flags}
        added += [_removed(name, use) for name, use in removed.items() if name not in taken]
        return adding("settings", added, settings)(command)

    names = [(flag, flag.path.replace(".", "_")) for flag in flags]
    of_path = {flag.path: flag.name for flag in flags}
    removed = {
        "--" + path.partition(".")[2].replace("_", "-"): of_path[now]
        for path, name in RENAMED.items()
        if (now := f"{path.partition('.')[0]}.{name}") in of_path
    }
    return decorate


def _removed(name: str, use: str) -> inspect.Parameter:
    """An option that is no more: it says what takes its place."""

    def refuse(given: str | None) -> None:
        if given is not None:
            raise typer.BadParameter(f"no such option; use {use}")

    option = typer.Option(name, hidden=True, callback=refuse)
    return keyword("removed_" + name[2:].replace("-", "_"), Annotated[str | None, option])


def type_of(field: FieldInfo) -> Any:
    """The type of a field without `| None`."""
    found = field.annotation
    if get_origin(found) in (Union, UnionType):
        found = next(each for each in get_args(found) if each is not type(None))
    return found


def model_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section of its own, else None."""
    found = type_of(field)
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _bounds(field: FieldInfo) -> str:
    """The range of a number: "from 1 to 8", "at least 1", "above 0" or nothing."""
    found: dict[str, Any] = {}
    for each in field.metadata:
        found |= {name: getattr(each, name) for name in ("ge", "gt", "le") if hasattr(each, name)}
    if "ge" in found and "le" in found:
        return f"from {found['ge']:g} to {found['le']:g}"
    said = {"ge": "at least", "gt": "above", "le": "at most"}
    return " and ".join(f"{said[name]} {value:g}" for name, value in found.items())


def _named_by_flags(error: Exception, given: Sequence[Flag]) -> str:
    """The sentences on wrong settings, with a flag's name where it was given by one."""
    names = {flag.path: flag.name for flag in given}
    found = getattr(error, "problems", ())
    return joined((_flag_of(path, names), reason) for path, reason in found) or str(error)


def _flag_of(path: str, names: Mapping[str, str]) -> str:
    for prefix, name in names.items():
        if path == prefix or path.startswith(f"{prefix}."):
            return name + path.removeprefix(prefix).replace(".", ": ", 1)
    return path


class SectionedCommand(TyperCommand):
    """A command whose help lists settings under their sections, after its own options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if record := each.get_help_record(ctx):
                panels.setdefault(getattr(each, "rich_help_panel", None) or "Options", []).append(
                    record
                )
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


def help_of(model: type[BaseModel], field: str) -> str:
    """What the model says of a field."""
    return model.model_fields[field].description or ""


def output(help_: str) -> Any:
    """An option for a file that a command writes when it is done."""
    return typer.Option(help=help_, dir_okay=False, writable=True)


def lengths(help_: str) -> Any:
    """An option for lengths in tokens, as `parse_lengths` reads them."""

    def checked(text: str | None) -> str | None:
        try:
            parse_lengths(text or "1")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return text

    return typer.Option(help=help_, metavar="LENGTHS", callback=checked)


def write(path: Path | None, text: Callable[[], str]) -> None:
    """Write what was found, if a path is given, and make missing folders. A failure is a sentence
    and ends the command with status 1."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(), encoding="utf-8")
    except (ImportError, OSError) as error:
        typer.echo(f"{path} was not written: {error}", err=True)
        raise typer.Exit(1) from None


def keyword(name: str, annotation: Any) -> inspect.Parameter:
    """An option that is None where it is not given."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def parameters_of(command: Command) -> list[inspect.Parameter]:
    """Its options, annotations evaluated."""
    found = inspect.signature(command, eval_str=True).parameters.values()
    return [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in found]


def _options(command: Command) -> set[str]:
    return {"--" + each.name.replace("_", "-") for each in parameters_of(command)}


def adding(
    argument: str, added: Sequence[inspect.Parameter], value: Callable[[dict[str, Any]], Any]
) -> Callable[[Command], Command]:
    """The command with further options, of which it gets one value as `argument`."""

    def decorate(command: Command) -> Command:
        own = [each for each in parameters_of(command) if each.name != argument]

        @functools.wraps(command)
        def run(**options: Any) -> None:
            taken = {each.name: options.pop(each.name) for each in added}
            command(**{argument: value(taken)}, **options)

        parameters = [*own, *added]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate
