"""The configuration of every service: a section of `weir.yaml`, environment variables, keyword arguments.

Later wins:  defaults < weir.yaml < WEIR_REDIS_URL and the like < WEIR_GATEWAY__PORT < keyword arguments

A secret may stand in a file: WEIR_ADMIN_KEYS_FILE names one with the value of WEIR_ADMIN_KEYS.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rollout_queue.config_file import (
    SECTIONS,
    MalformedSettings,
    config_file,
    file_document,
    refuse_unknown_sections,
    unknown_variables,
)

logger = logging.getLogger(__name__)

SHORT_NAMES = frozenset(
    {
        *("redis_url", "redis_password_file", "redis_sentinel_password_file", "redis_key_prefix"),
        *("redis_ca_file", "redis_certificate_file", "redis_key_file", "redis_check_hostname"),
        *("redis_wait_replicas", "redis_wait_timeout_s"),
        *("gateway_url", "client_keys", "admin_keys"),
        *("rollout_server_key", "trainer_key", "engine_key"),
        *("model_path", "model_name", "engines", "router_replay"),
        *("log_format", "access_log", "otel"),
    }
)
"""Fields that deployments set for several services at once, by variables such as WEIR_REDIS_URL."""

SECRETS = frozenset(
    {"client_keys", "admin_keys", "rollout_server_key", "trainer_key", "engine_key", "redis_url"}
)
"""Fields whose short variable may name a file in place of the value: WEIR_ADMIN_KEYS_FILE."""
MOST_SECRET_BYTES = 65536


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


CommaSeparated = Annotated[list[str], NoDecode, BeforeValidator(_split)]
"""A list that an environment variable may give as `a,b,c`."""


ServiceKey = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,512}$")] | None
"""A key that services present to each other: visible ASCII, which a header can carry."""


@dataclass(frozen=True)
class Hidden:
    """Marks a field that `weir config` does not print while it has its default. It is read as any other."""

    reason: str


FOR_TESTS = Hidden("tests set it, mostly to wait less; no deployment needs another value")
BOUND = Hidden("a bound against abuse, which ordinary use does not come near")
TUNED = Hidden("found by measurement; nothing about a deployment asks for another value")


class SettingsPart(BaseModel):
    """A group of fields in a section. Unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _plain(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("give an http:// or https:// address without credentials")
    return url


PlainUrl = Annotated[str, AfterValidator(_plain)]
ServiceUrl = Annotated[str, AfterValidator(lambda url: url.rstrip("/"))]


class ObjectStoreSettings(SettingsPart):
    """Where the S3-compatible store of policies is. Its keys come from the environment or from the files of
    AWS's own tools, and never from the configuration."""

    endpoint_url: PlainUrl | None = None
    """http://host:port; null means AWS, or what AWS_ENDPOINT_URL says."""
    region: str | None = None
    """Null means what AWS_DEFAULT_REGION or the profile says."""


class ServiceSettings(BaseSettings):
    """One section of the configuration. A subclass names its section and its fields."""

    section: ClassVar[str]
    owners: ClassVar[Mapping[str, str]] = {}
    """For a field that is set in another section: SECTION.FIELD, by which users know it."""
    retired: ClassVar[Mapping[str, str]] = {}
    """Fields of former versions, and what holds now. A configuration may still have them: a warning says that
    they do nothing."""
    log_format: Literal["text", "json"] = "text"
    """The form of the log: lines of text, or one JSON object a line."""
    access_log: bool = False
    """Log a line for each request that was served."""
    model_config = SettingsConfigDict(
        extra="forbid",
        env_nested_delimiter="__",
        protected_namespaces=(),
        hide_input_in_errors=True,  # an input may be a secret
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (
            init_settings,
            EnvSettingsSource(settings_cls, env_prefix=f"WEIR_{cls.section.upper()}__"),
            _ShortNames(settings_cls, env_prefix="WEIR_"),
            InitSettingsSource(settings_cls, _secrets_in_files(SECRETS & settings_cls.model_fields.keys())),
            InitSettingsSource(settings_cls, _given(_file_section(cls.section), settings_cls)),
        )

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, given: dict[str, Any]) -> dict[str, Any]:
        variables = {name for name in cls.retired if f"WEIR_{cls.section}__{name}".upper() in os.environ}
        for name in sorted(cls.retired.keys() & given.keys() | variables):
            now = cls.retired[name]
            logger.warning("%s.%s has no effect any more: remove it; %s", cls.section, name, now)
        return {name: value for name, value in given.items() if name not in cls.retired}

    @model_validator(mode="after")
    def _keys_are_secrets(self) -> Self:
        for name in sorted(SECRETS.difference({"redis_url"}) & type(self).model_fields.keys()):
            given: str | list[str] | None = getattr(self, name)
            for key in [given] if isinstance(given, str) else given or []:
                if not is_secret(key):
                    raise ValueError(
                        f"{self.section}.{name}: {key!r} is what is shown in place of a key, and no key: "
                        "write the key itself"
                    )
        return self


class HttpSettings(ServiceSettings):
    """One section of a service that listens on an address."""

    host: str = "127.0.0.1"
    port: int


def is_secret(key: str) -> bool:
    """Whether the text can be a secret. Asterisks stand for one in logs, so they let nobody in."""
    return bool(key.strip("* \t"))


S = TypeVar("S", bound=ServiceSettings)


class _ShortNames(EnvSettingsSource):
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        # Other fields have no short name: Kubernetes sets WEIR_PORT itself if a service is named "weir".
        if field_name not in SHORT_NAMES:
            return None, field_name, False
        return super().get_field_value(field, field_name)


def secret(name: str) -> str:
    """The value of the variable of this name (`WEIR_CLIENT_KEYS`), or what the file holds that `{name}_FILE`
    names, with commas in place of line ends; empty if neither is set. Raises MalformedSettings."""
    value, path = os.environ.get(name, ""), os.environ.get(f"{name}_FILE", "")
    if not path:
        return value
    if value:
        raise MalformedSettings(f"{name} and {name}_FILE are both set: set one of them")
    try:
        with Path(path).open("rb") as file:
            text = file.read(MOST_SECRET_BYTES + 1).decode()
    except OSError as error:
        raise MalformedSettings(f"{name}_FILE: {path} cannot be read: {error.strerror}") from error
    except UnicodeError:
        raise MalformedSettings(f"{name}_FILE: {path} is not UTF-8") from None
    found = ",".join(filter(None, map(str.strip, text.splitlines())))
    if not found or len(text) > MOST_SECRET_BYTES:
        fault = "empty" if not found else f"larger than {MOST_SECRET_BYTES} bytes"
        raise MalformedSettings(f"{name}_FILE: {path} is {fault}")
    return found


def _secrets_in_files(names: Iterable[str]) -> dict[str, Any]:
    """The secrets of these fields that stand in files."""
    variables = {name: f"WEIR_{name.upper()}" for name in names}
    return {name: secret(each) for name, each in variables.items() if os.environ.get(f"{each}_FILE")}


def _given(section: dict[str, Any], settings_cls: type[BaseSettings]) -> dict[str, Any]:
    """`section` without required fields that are null. `weir config` prints these for the user to set."""
    required = {name for name, field in settings_cls.model_fields.items() if field.is_required()}
    return {name: value for name, value in section.items() if value is not None or name not in required}


def _file_section(section: str) -> dict[str, Any]:
    return file_document().get(section, {})


def read_settings(kind: type[S], **given: Any) -> S:
    """The settings of a service. Raises MalformedSettings with the first fault as one sentence."""
    try:
        return kind(**given)
    except ValidationError as error:
        raise MalformedSettings(sentence_of(kind, error)) from error
    except SettingsError as error:  # a variable is not JSON
        raise MalformedSettings(f"{kind.section}: {error}: {error.__cause__}") from error


def check_names(*kinds: type[ServiceSettings]) -> list[str]:
    """Sentences about variables that nobody reads. Raises MalformedSettings for an unknown section of
    weir.yaml, and for an unknown section or field in a variable. `kinds` are those whose fields are known."""
    fields = {kind.section: {*kind.model_fields, *kind.retired} for kind in kinds}
    refuse_unknown_sections(config_file(), file_document(), {**dict.fromkeys(SECTIONS), **fields})
    return unknown_variables(fields, SHORT_NAMES | {f"{name}_file" for name in SECRETS})


def sentence_of(kind: type[ServiceSettings], error: ValidationError) -> str:
    """The first fault of a section, in a sentence that names the field."""
    # If a field is wrong, pydantic also reports each field whose default depends on it.
    faults = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
    first = faults[0]
    field, *below = map(str, first["loc"] or ("",))
    where = ".".join(filter(None, [kind.owners.get(field, f"{kind.section}.{field}".strip(".")), *below]))
    if first["type"] == "extra_forbidden":
        return f"{where}: there is no such setting{_meant_field(kind, [*map(str, first['loc'])])}"
    if first["type"] == "missing" and len(first["loc"]) == 1:
        name = str(first["loc"][0])
        variable = f"WEIR_{name}" if name in SHORT_NAMES else f"WEIR_{kind.section}__{name}"
        return f"{where} has no default: set it in weir.yaml, or set {variable.upper()}"
    said = why(error)
    if first["type"] in ("model_type", "dict_type"):
        said = "it is a group of fields: write NAME: VALUE below it"
    # The sentences of our own checks name the field where more than one is concerned.
    return said if said.startswith(f"{kind.section}.") else f"{where}: {said}"


def why(error: ValidationError) -> str:
    """What is wrong with the first faulty field, without its name."""
    first = next(each for each in error.errors() if each["type"] != "default_factory_not_called")
    return str(first.get("ctx", {}).get("error", first["msg"]))


def _meant_field(kind: type[ServiceSettings], place: Sequence[str]) -> str:
    """The setting that was probably meant: one of this name elsewhere in the section, or one of the same
    group with a similar name."""
    paths = [*_paths(kind)]
    group = f"{place[0]}." if len(place) > 1 else ""
    beside = [path for path in paths if path.startswith(group) and (group or "." not in path)]
    for several, names in (
        (paths, [place[-1]]),
        (beside, get_close_matches(place[-1], map(_last, beside), 1)),
    ):
        if found := [path for path in several if _last(path) in names]:
            return f"; did you mean {kind.section}.{min(found, key=lambda path: path.count('.'))}?"
    return ""


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _paths(kind: type[BaseModel]) -> Iterator[str]:
    """All fields of a section, those in groups of fields as GROUP.FIELD."""
    for name, field in kind.model_fields.items():
        yield name
        for group in models_in(field.annotation):
            yield from (f"{name}.{inner}" for inner in _paths(group))


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from models_in(each)
