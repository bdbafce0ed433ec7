"""Secrets don't get through, and ordinary words do."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runmirror.log.masking import is_secret_key, mask_json, mask_text, mask_url


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "apikey",
        "API_KEY",
        "openaiApiKey",
        "WANDB_API_KEY",
        "api_key_2",
        "token",
        "hf_token",
        "HF_TOKEN",
        "hubToken",
        "accessToken",
        "auth_token",
        "password",
        "passwd",
        "db_password",
        "dbPassword",
        "pwd",
        "secret",
        "client_secret",
        "secret_key",
        "SECRETS",
        "credential",
        "credentials",
        "private_key",
        "ssh_private_key",
        "access_key",
        "aws_access_key_id",
        "aws_secret_access_key",
        "authorization",
        "auth",
        "auth_header",
        "X-Api-Key",
        "bearer",
        "cookie",
        "passphrase",
        "wandb_key",
        "--api-key",
        "env.HF_TOKEN",
    ],
)
def test_secret_keys(key: str) -> None:
    """True for keys that name a secret, in any spelling."""
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key",
    [
        *(
            [
                "tokens",
                "max_tokens",
                "num_tokens",
                "tokenizer",
                "token_budget",
                "token_count",
                "tokenizer_path",
                "max_token_length",
            ]
        ),
        *(["pad_token", "eos_token", "bos_token", "special_token", "loss_per_token", "first_token", "token_type_ids"]),
        *(
            [
                "key",
                "keys",
                "sort_key",
                "reward_key",
                "author",
                "authors",
                "monkey",
                "keyword",
                "api_key_env",
                "credentials_path",
                "password_file",
            ]
        ),
        *(["secret_name", "hidden_size", "lr", "token_ids", "auth_type", "step_key", "access", "api", "private"]),
        "",
        "123",
    ],
)
def test_other_keys(key: str) -> None:
    """False for words of language models, and for keys that say where a secret is."""
    assert not is_secret_key(key)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://user:pass@host/path", "https://***@host/path"),
        ("https://token@host", "https://***@host"),
        ("postgresql+psycopg2://u:p@ss@db:5432/x", "postgresql+psycopg2://***@db:5432/x"),
        ("redis://:pa/ss@host/0", "redis://***@host/0"),
        ("https://host:5000/a@b", "https://host:5000/a@b"),
        ("https://host/v1@2?x=1", "https://host/v1@2?x=1"),
        ("https://host/?api_key=abc&n=1#token=x", "https://host/?api_key=***&n=1#token=***"),
        ("https://h/?X-Amz-Signature=ab&sig=cd&max_tokens=5", "https://h/?X-Amz-Signature=***&sig=***&max_tokens=5"),
        ("http://localhost:5000", "http://localhost:5000"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("mlruns", "mlruns"),
        ("", ""),
    ],
)
def test_urls(url: str, expected: str) -> None:
    """The URL without user, password and secret query values; anything else as it was."""
    assert mask_url(url) == expected
    assert mask_text(f"see <{url}>, ok") == f"see <{expected}>, ok"


A = "abcdefgh12345678"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"hf_{A}", "***"),
        (f"x sk-{A} y", "x *** y"),
        (f"sk-proj-{A}_-{A}", "***"),
        (f"sk-ant-api03-{A}", "***"),
        (f"ghp_{A}", "***"),
        (f"github_pat_{A}_{A}", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        (f"xoxb-1234-{A}", "***"),
        (f"glpat-{A}", "***"),
        (f"eyJ{A}.eyJ{A}.{A}", "***"),
        (f"AIza{A}{A}{A}", "***"),
        (f"Authorization: Bearer {A}", "Authorization: Bearer ***"),
        (f"curl -H 'authorization: Basic {A}'", "curl -H 'authorization: Basic ***'"),
        ("WANDB_API_KEY=" + "0a" * 20, "WANDB_API_KEY=***"),
        ("0a" * 20, "0a" * 20),
        ('os.environ["WANDB_API_KEY"] = "0123456789"', 'os.environ["WANDB_API_KEY"] = "***"'),
        ("+    api_key: str = 'abcdefg'", "+    api_key: str = '***'"),
        ('{"password": "with space"}', '{"password": "***"}'),
        ("-db_password: hunter22\n+lr: 1", "-db_password: ***\n+lr: 1"),
        ("run --api-key=abcdef --lr=1", "run --api-key=*** --lr=1"),
        ("api_key = os.environ['KEY']", "api_key = os.environ['KEY']"),
        ("def f(token: Optional[str], password: str) -> None:", "def f(token: Optional[str], password: str) -> None:"),
        ("max_tokens=1024 tokenizer='byte-level'", "max_tokens=1024 tokenizer='byte-level'"),
        ("import sk-learn-contrib-extras, hf_transfer, eyJ.x", "import sk-learn-contrib-extras, hf_transfer, eyJ.x"),
        ("commit: 4b825dc642cb6eb9a060e54bf8d69288fbee4904", "commit: 4b825dc642cb6eb9a060e54bf8d69288fbee4904"),
    ],
)
def test_text(text: str, expected: str) -> None:
    """*** for each secret, and the text around it as it was; code that only names a secret stays."""
    assert mask_text(text) == expected
    assert mask_text(expected) == expected


@pytest.mark.parametrize("prefix", ["", "+", "-", " "])
def test_private_keys(prefix: str) -> None:
    """One *** for a private key block, in a diff as well, and for one whose end was cut off."""
    lines = ["-----BEGIN RSA PRIVATE KEY-----", *["MIIEabc+/=" * 6] * 3, "-----END RSA PRIVATE KEY-----"]
    block = "\n".join(prefix + line for line in lines)
    assert mask_text(f"a\n{block}\nb") == f"a\n{prefix}***\nb"
    assert "MIIE" not in mask_text("\n".join(lines[:3]))


@pytest.mark.parametrize(
    "text",
    ["a", "a-", "-----BEGIN PRIVATE KEY-----", "https://", "https://a:", "api_key: ", "eyJaaaaaaaa.", "token='", "?a&"],
)
def test_time_is_linear(text: str) -> None:
    """A few seconds at most for a megabyte of the worst text."""
    start = time.perf_counter()
    mask_text(text * (1_000_000 // len(text)))
    assert time.perf_counter() - start < 20


PIECES = [
    "https://",
    "u",
    ":",
    "@",
    "/",
    "token",
    "=",
    '"',
    "-",
    "\n",
    "?",
    "&",
    "api_key",
    "sk-",
    "abcdefgh12345678",
    "*",
]


@given(st.text(st.characters()) | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text(text: str) -> None:
    """No exception, and the same again for what was masked."""
    masked = mask_text(text)
    assert mask_text(masked) == masked
    mask_url(text)


def test_json_is_masked_by_its_keys() -> None:
    """Everything below a key that says secret, and secrets in text; without any, not a byte changes."""
    text = (
        '{"credentials": {"user": "me", "pin": 1234, "on": true}, "tokens": 5, "url": "https://a:b@h", "n": [NaN, 1]}'
    )
    assert mask_json(text) == (
        '{\n  "credentials": {\n    "user": "***",\n    "pin": "***",\n    "on": true\n  },\n  "tokens": 5,\n'
        '  "url": "https://***@h",\n  "n": [\n    NaN,\n    1\n  ]\n}\n'
    )
    clean = '{"lr" :4e-05,   "max_tokens": 5}'
    assert mask_json(clean) == clean


def test_what_is_no_json_is_masked_as_text() -> None:
    """A torn file, and one that is nested without end."""
    assert "secret99" not in mask_json('{"lr": 1, "url": "https://me:secret99@host"')
    assert mask_json("[" * 100_000) == "[" * 100_000
