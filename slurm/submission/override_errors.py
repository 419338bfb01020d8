"""Errors of overrides that Hydra's parser or OmegaConf would explain without the fix."""

import re
import shlex
from collections.abc import Mapping, Sequence

from hydra.core.override_parser.types import Override
from omegaconf.errors import ConfigIndexError

from pipeline.config import known_keys
from pipeline.config.validation import is_list
from pipeline.errors import ConfigError


def syntax_error(text: str, reason: str) -> ConfigError:
    """The error of an override that Hydra cannot parse: how to quote it, or Hydra's reason."""
    key, equals, value = text.partition("=")
    if not equals or value.endswith(","):
        return ConfigError(text, text, "key=value", reason)
    if value[:1] in tuple("[{'\"") or "${" in value or re.match(r"\w+\(", value):
        hint = f"close its brackets and quotes, and quote texts in it that have other signs than letters ({reason})"
    elif not re.fullmatch(r"[+~]{0,2}[\w/@:-]+(\.[\w/@:-]+)*", key) or re.search(r"\.-", key):
        return ConfigError(key, value, "a key in Hydra's syntax", reason)
    else:
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        hint = "quote it: " + shlex.quote(f'{key}="{escaped}"') + f" ({reason})"
    return ConfigError(key, value, "a value in Hydra's syntax", hint)


def refuse_list_mistakes(override: Override) -> None:
    """Raise `ConfigError` for a mapping in place of a list, and for a name in place of the number of an element."""
    keys, key, value = known_keys(), override.key_or_group, override.value()
    if is_list(keys.get(key)) and isinstance(value, Mapping):
        raise ConfigError(key, value, "a list", f"in brackets, also with one element: {key}=[…]")
    parts = key.split(".")
    for end in range(1, len(parts)):
        head = ".".join(parts[:end])
        if is_list(keys.get(head)) and not parts[end].isdigit():
            hint = f"elements have numbers: {'.'.join([head, '0', *parts[end + 1 :]])}=… is of the first one"
            raise ConfigError(key, value, f"a number in place of {parts[end]!r}", hint)


def missing_element(error: BaseException, overrides: Sequence[str]) -> ConfigError | None:
    """The error of an override of an element that a list does not have."""
    cause = error if isinstance(error, ConfigIndexError) else error.__cause__
    if not isinstance(cause, ConfigIndexError) or not cause.full_key:
        return None
    element = re.sub(r"\[(\d+)\]", r".\1", cause.full_key)
    text = next((text for text in overrides if re.match(rf"\+*{re.escape(element)}[.=]", text)), element)
    key, _, value = text.lstrip("+").partition("=")
    hint = f"elements count from 0; to add one, set the whole list: {element.rpartition('.')[0]}=[…]"
    return ConfigError(key, value, "an element that the list has", hint)
