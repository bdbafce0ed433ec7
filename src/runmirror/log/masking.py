"""Secrets out of text: what must not be kept or sent is replaced by ``***``.

Guarantees:

- Nothing here raises for any text, and masking a masked text changes nothing that matters.
- Time is linear in the text, so a large diff can be masked.
- What is masked is what can be told from a name (``api_key``, ``HF_TOKEN``) or from a shape (``https://user:pass@host``,
  ``ghp_...``, a private key block). A secret that looks like any other word stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET = re.compile(
    r"passw(or)?d|passphrase|secret|credential|authorization|authheader|(hf|auth|access|api|bearer|refresh|session)token$"
    r"|(api|private|access|account|signing|encryption|master|license|ssh|auth|wandb|hf|huggingface|openai|anthropic|azure"
    r"|aws|google|gemini|tinker|neptune|comet|github|gitlab)keys?(id|base64|b64|value)?$"
)
_ABOUT = re.compile(r"path|file|filename|dir|env|var|name|type|len(gth)?|count|rate|limit|policy|url|uri|endpoint")
"""Last words that make a key one about a secret, such as ``api_key_env`` or ``credentials_path``."""
_VOCABULARY = re.compile(
    r"[beps]os|eod|pad|unk|sep|cls|mask|stop|start|end|begin|image|video|audio|think|tool|special|first|last|next|per"
)
"""Words before ``token`` that mean a token of a language model."""

_URL = re.compile(r"(?<![A-Za-z0-9])[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s\"'<>`]+")
_QUERY = re.compile(r"([?&#;])([^=&#;]{1,80})=([^&#;]+)")
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_])(?:(?:hf|api_org|gsk|r8|npm)_[A-Za-z0-9]{12,}|(?:gh[pousr]|github_pat|[srp]k_live)_\w{12,}"
    r"|sk-(?:[A-Za-z0-9]{16,}|(?:proj|ant|or|svcacct|admin|lf)-[\w-]{12,})|(?:glpat|nvapi|pypi)-[\w-]{12,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|xox[abeprs]-[\w-]{10,}|(?:tml|xai)-[A-Za-z0-9]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)
_HEADER = re.compile(r"(?i)(\bbearer\s+|\bauthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?\w{1,20}\s+)[\w.~+/=-]{8,}")
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
    r"(?:(?:[^-]|-(?!----)){0,16000}-{5,6}END [A-Z ]{0,30}PRIVATE KEY-----|[\sA-Za-z0-9+/=]{40,})"
)
_ASSIGNED = re.compile(
    r"(?<!\w)(?P<name>[A-Za-z_][\w-]{1,60})(?P<between>[\"'\]]{0,3}[ \t]{0,3}(?::[^=\n\"']{1,40}=|[=:])[ \t]{0,3})"
    r"(?:(?P<quote>[\"'])[^\"'\n]{6,}(?=[\"'])|[^\s\"'`<>{}()\[\],;$]{6,})"
)


def is_secret_key(key: str) -> bool:
    """Whether a value under this key is a secret: ``api_key``, ``HF_TOKEN``, ``dbPassword``; not ``max_tokens``,
    ``pad_token``, ``tokenizer`` or ``api_key_env``."""
    words = [word.lower() for word in _WORDS.findall(key)]
    while words and words[-1].isdigit():
        words.pop()
    if not words or _ABOUT.fullmatch(words[-1]):
        return False
    if words[-1] == "token":
        return len(words) == 1 or not _VOCABULARY.fullmatch(words[-2])
    return words[-1] in ("auth", "pwd", "cookie", "bearer") or _SECRET.search("".join(words)) is not None


def mask_url(url: str) -> str:
    """The URL with its user and password, and query values whose name says secret, as ``***``."""
    scheme, separator, rest = url.partition("://")
    if separator:
        host = re.split(r"[/?#]", rest, maxsplit=1)[0]
        port = host.rpartition(":")[2]
        if "@" in host:
            rest = f"{MASK}@{host.rpartition('@')[2]}{rest[len(host) :]}"
        elif "@" in rest and ":" in host and not port.isdigit():  # a password with a slash in it
            rest = f"{MASK}@{rest.rpartition('@')[2]}"
    return scheme + separator + _QUERY.sub(_mask_query, rest)


def _mask_query(found: re.Match[str]) -> str:
    start, name, value = found.groups()
    hidden = is_secret_key(name) or name.lower() in ("key", "sig") or name.lower().endswith("signature")
    return f"{start}{name}={MASK if hidden else value}"


def mask_text(text: str) -> str:
    """The text with every secret that can be told from its shape as ``***``: credentials in URLs, tokens of well-known
    services, private key blocks, authorization headers, and what is assigned to a name that says secret."""
    text = _URL.sub(lambda found: mask_url(found[0]), text)
    text = _TOKEN.sub(MASK, _KEY_BLOCK.sub(MASK, text))
    return _ASSIGNED.sub(_mask_assigned, _HEADER.sub(rf"\g<1>{MASK}", text))


def mask_json(text: str) -> str:
    """A JSON text with its secrets as ``***``: what stands under a key that says secret, and secrets in any text. It stays
    as it is when there are none; what is no JSON is masked as text."""
    try:
        data = json.loads(text)
        masked = mask_values(data)
        return text if masked == data else json.dumps(masked, indent=2, ensure_ascii=False) + "\n"
    except (ValueError, RecursionError):
        return mask_text(text)


def mask_values(value: Any, secret: bool = False) -> Any:
    """Plain data (mappings, lists, text, numbers) without its secrets; ``secret``: all of it is one."""
    if isinstance(value, Mapping):
        return {key: mask_values(one, secret or is_secret_key(str(key))) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_values(one, secret) for one in value]
    if secret and value not in ("", None, True, False):
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def _mask_assigned(found: re.Match[str]) -> str:
    name, between, quote = found["name"], found["between"], found["quote"] or ""
    if not is_secret_key(name):
        return found[0]
    if not quote:  # NAME=value and --name=value of a shell; name: value and name = value of YAML and TOML
        value = found[0][len(name + between) :]
        shell = between == "=" and (name.isupper() or found.string[: found.start()].endswith("--"))
        ends_line = found.string[found.end() : found.end() + 1] in ("", "\n", "\r")
        if not shell and not (ends_line and any(char.isdigit() for char in value)):
            return found[0]
    return f"{name}{between}{quote}{MASK}"
