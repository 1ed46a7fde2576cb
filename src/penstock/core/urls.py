"""What messages, records and terminals show of foreign text: no passwords and tokens, no control characters.

redact          a text: of URLs no user, query and fragment; no value of what is named like a secret, as in
                `--hf-token X` and `api_key=X`; no token of a known form
redact_command  the words of a command line, also where a name alone (`--key X`) says what the next word is
shown           both, for what is printed
redact_all      the same of `redact` for each text in lists and mappings, before they are written as JSON
printable       a text whose control characters, and those that turn the order of letters, are written out
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://[^\s'\"<>]+)", re.IGNORECASE)
_AFTER_A_URL = ").,;:]"
"""What ends a sentence, and not a URL."""
_PARAMETER = re.compile(r"([?&#][\w.~%-]+=)[^\s'\"<>&]+")
_USER = re.compile(r"[^/?#]*@|[^/@:\[]*:(?!\d*/)[^@]*@")
"""What stands before the host; keys of S3 have slashes. `host:80/a@b` has none."""


_ENDINGS = (
    *(
        "token",
        "secret",
        "secrets",
        "password",
        "passwords",
        "passwd",
        "passphrase",
        "pwd",
        "credential",
        "credentials",
    ),
    *("apikey", "accesskey", "secretkey", "privatekey", "signature", "authorization", "cookie"),
)
"""How words of names end that stand for secrets."""
_AMBIGUOUS = {"key", "keys", "tokens", "auth", "pass", "bearer"}
"""Words that stand for a secret in the name of an argument, and elsewhere behind one of these."""
_BEFORE_KEYS = {
    *("api", "access", "secret", "private", "account", "shared", "signing", "encryption", "ssh", "master", "storage"),
    *("aws", "azure", "gcp", "hf", "wandb", "openai", "client", "service", "auth", "session", "refresh", "basic"),
}
_COMMON = {"token", "secret", "signature", "credential", "credentials"}
"""Words that stand before a colon in sentences, too."""
_NO_VALUES = {
    *("file", "files", "path", "dir", "folder", "column", "columns", "field", "type", "length", "len", "size", "dim"),
    *("count", "mode", "ids", "index", "embedding", "embeddings", "weight", "weights", "loss"),
}
"""What a name ends with that is about a secret or a key, and says none."""
_HARMLESS = {"anon", "none", "null", "true", "false", "..."}
"""Values that are no secrets."""
_VOCABULARY = {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "special", "image", "end", "start", "per"}
"""Tokens of a tokenizer."""
_VALUE = re.compile(r"""(?P<quote>\\?["'])(?:.*?(?P=quote)|.*)|[^\s"'&;,<>)}\]]+""")
_ASSIGNED = re.compile(r"""(?P<name>(?<![\w.-])-{0,2}[A-Za-z_][\w.-]*)(?P<between>(?:\\?["'])?\s?[=:]\s?)""")
_OPTION = re.compile(r"""(?P<name>(?<![\w.-])--?[A-Za-z][\w.-]*)(?P<between>["']?,?\s)(?!["']?-)""")
_AUTHORIZATION = re.compile(r"(\b(?:authorization\W{1,5}\w+|bearer)\s+)[\w.~+/=-]{4,}", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abopr]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
"""The forms of tokens of the Hugging Face Hub, GitHub, GitLab, OpenAI, Slack and AWS, and of JSON Web Tokens."""


def without_query(url: str) -> str:
    """Return a URL without what follows its path. Outside of the web, a question mark may also be part of a name.

    >>> [without_query(one) for one in ("http://host/a.tar?sig=x", "s3://bucket/a?versionId=1", "s3://bucket/b?.tar")]
    ['http://host/a.tar', 's3://bucket/a', 's3://bucket/b?.tar']
    """
    path, _, query = url.partition("?")
    return path if "://" in path and (url.startswith("http") or "=" in query) else url


def redact_url(url: str) -> str:
    """Return a URL as messages show it: without a password, and without the signature of a signed one.

    >>> redact_url("https://me:secret@host/a.tar?signature=abc")
    'https://host/a.tar?…'
    """
    scheme, separator, rest = url.partition("://")
    user = _USER.match(rest)
    shown = f"{scheme}{separator}{rest[user.end() :] if user else rest}"
    path = without_query(shown)
    if scheme in ("http", "https"):
        path = path.partition("#")[0]
    return shown if path == shown else f"{path}?…"


def redact(text: str) -> str:
    """Return a text as messages and records show it: without what is secret in it.

    >>> redact("'--hf-token', 'abc' and API_KEY=abc, {'password': 'abc'}, X-Api-Key: abc")
    "'--hf-token', '…' and API_KEY=…, {'password': '…'}, X-Api-Key: …"
    >>> redact("Cannot connect to 'http://me:pw@host/a?sig=abc' GET /a?sig=abc&x=1")
    "Cannot connect to 'http://host/a?…' GET /a?sig=…&x=…"
    >>> redact("a?b=c.tar is a file here")
    'a?b=c.tar is a file here'
    """
    if "://" in text:
        text = _PARAMETER.sub(_elide, _URL.sub(_redact_found, text))
    text = _without_values(_OPTION, _AUTHORIZATION.sub(_elide, text))
    return _TOKEN.sub("…", _without_values(_ASSIGNED, text))


def redact_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command line as records and messages show it: without the values of arguments named like secrets.

    >>> redact_command(["train.py", "--hf-token", "abc", "--key=abc", "--lr", "0.1", "HF_TOKEN=abc", "s3://k:s@b/a"])
    ('train.py', '--hf-token', '…', '--key=…', '--lr', '0.1', 'HF_TOKEN=…', 's3://b/a')
    """
    shown, hides = [], False
    for word in command:
        is_option = re.match(r"--?[A-Za-z]", word) is not None
        name, is_set, value = word.partition("=")
        if hides and not is_option:
            shown.append("…")
            hides = False
        elif is_set and value and _is_secret(name, alone=True) and re.fullmatch(r"[\w.+-]+", name):
            shown.append(f"{name}=…")
            hides = False
        else:
            shown.append(redact(word))
            hides = is_option and not is_set and _is_secret(word, alone=True)
    return tuple(shown)


def shown(text: str) -> str:
    """Return a text as a terminal shows it: nothing secret, and nothing that controls it."""
    return printable(redact(text))


def redact_all(value: Any) -> Any:
    """Return what JSON can hold without what is secret in its texts.

    >>> redact_all({"path": "s3://key:secret@bucket/a", "sizes": [1, 2]})
    {'path': 's3://bucket/a', 'sizes': [1, 2]}
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: redact_all(one) for name, one in value.items()}
    return [redact_all(one) for one in value] if isinstance(value, (list, tuple)) else value


def printable(text: str) -> str:
    r"""Return a text that cannot control a terminal: what is no letter, sign or space is written out.

    Ends of lines and tabs stay. Escape sequences, carriage returns, and characters that turn the direction of writing
    do not.

    >>> printable("größer\n"), printable("a\r\x1b]8;;http://b\x07"), printable("\u202egnp.exe")
    ('größer\n', 'a\\r\\x1b]8;;http://b\\x07', '\\u202egnp.exe')
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" or _is_space(one) else _written_out(one) for one in text)


def _is_space(one: str) -> bool:
    return unicodedata.category(one) == "Zs"


def _written_out(one: str) -> str:
    return one.encode("ascii", "backslashreplace").decode() if one > "\x7f" else repr(one)[1:-1]


def redact_of(url: str, text: str) -> str:
    """Return the text of another library's error about a URL: nothing that is secret in the URL stands in it.

    >>> redact_of("s3://AK:SK@bucket/a", 'Invalid bucket name "AK:SK@bucket"')
    'Invalid bucket name "bucket"'
    """
    rest = url.partition("://")[2]
    user = _USER.match(rest)
    if user and len(user[0]) > 1:
        text = text.replace(user[0], "")
    return _PARAMETER.sub(_elide, redact(text))


def _redact_found(found: re.Match[str]) -> str:
    url = found[0].rstrip(_AFTER_A_URL)
    return redact_url(url) + found[0][len(url) :]


def _elide(found: re.Match[str]) -> str:
    return f"{found[1]}…"


def _without_values(pattern: re.Pattern[str], text: str) -> str:
    """Return a text without the values of what is named like a secret; `pattern` finds names before values."""
    parts, at, found = [], 0, pattern.search(text)
    while found is not None:
        end = found.end()  # a value that is shown may hold other names
        value = _VALUE.match(text, end) if _says_secret(found["name"], found["between"]) else None
        if value is not None and value[0].strip("\\\"'").lower() not in _HARMLESS:
            quote = value["quote"] or ""
            parts.append(f"{text[at:end]}{quote}…{quote}")
            at = end = value.end()
        found = pattern.search(text, end)
    return "".join([*parts, text[at:]])


def _says_secret(name: str, between: str) -> bool:
    if between.lstrip().startswith(":") and name.lower() in _COMMON:  # "unexpected token: x"
        return False
    return _is_secret(name, alone=name.startswith("-"))


def _is_secret(name: str, *, alone: bool) -> bool:
    """Return whether a name is that of a secret, as in "--hf-token", "awsSecretAccessKey" and "WANDB_API_KEY".

    Args:
        name: of an argument, a variable or a header.
        alone: whether a word that has other meanings, too, is enough: "key" and "auth".

    >>> [_is_secret(name, alone=False) for name in ("HF_TOKEN", "api_key", "max_tokens", "eos_token", "key_file")]
    [True, True, False, False, False]
    """
    words = _words(name)
    if not words or words[-1] in _NO_VALUES:
        return False
    for before, word in zip(["", *words], words, strict=False):
        if word == "sig" or (word.endswith(_ENDINGS) and not (word == "token" and before in _VOCABULARY)):
            return True
        if word in _AMBIGUOUS and (before in _BEFORE_KEYS or (alone and (word in ("key", "auth") or len(words) == 1))):
            return True
    return False


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
