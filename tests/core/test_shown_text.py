"""Of foreign text, messages and records show no secret, and terminals no control character."""

from __future__ import annotations

import pickle
import stat
from pathlib import Path

import pytest

from penstock.core.errors import RecordError, SourceError
from penstock.core.urls import printable, redact, redact_all, redact_command, shown
from penstock.observe.atomic_write import write_text_atomic

SECRET = "s3cr-t"

TEXTS = [
    f"unrecognized arguments: --hf-token {SECRET} --lr 1",
    f"Command '['curl', '--token', '{SECRET}']' returned non-zero exit status 1",
    f"Command '['train', '--api-key={SECRET}']' failed",
    f"HF_TOKEN={SECRET}",
    f"export AWS_SECRET_ACCESS_KEY='{SECRET}'; run",
    f"AWS_SESSION_TOKEN = {SECRET}",
    f"wandb: api_key={SECRET}",
    f"login(token={SECRET!r}, add=True)",
    f"{{'password': '{SECRET} with words', 'user': 'me'}}",
    f'{{"client_secret": "{SECRET}"}}',
    f'{{\\"access_token\\": \\"{SECRET}\\"}}',
    f"Authorization: Bearer {SECRET}",
    f"Authorization: Basic {SECRET}==",
    f"{{'Authorization': 'Bearer {SECRET}'}}",
    f"X-Api-Key: {SECRET}",
    f"Cookie: session={SECRET}; a",
    f"AccountName=me;AccountKey={SECRET}==;EndpointSuffix=x",
    f"SharedAccessSignature={SECRET}",
    f"sig={SECRET}",
    f"https://me:{SECRET}@host/a",
    f"https://{SECRET}@host/a",
    f"https://me:p@{SECRET}@host/a",
    f"postgresql://me:{SECRET}@host/db",
    f"s3://AKIA:{SECRET}/more@bucket/a",
    f"https://host/a?X-Amz-Algorithm=A&X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}&X-Amz-Security-Token={SECRET}",
    f"https://bucket.s3.amazonaws.com/a?AWSAccessKeyId={SECRET}&Signature={SECRET}&Expires=1",
    f"https://me.blob.core.windows.net/c/a?sv=1&sig={SECRET}",
    f"https://host/a#access_token={SECRET}",
    f"GET /a?token={SECRET} of https://host/a",
]


@pytest.mark.parametrize("text", TEXTS)
def test_no_secret_of_a_text_is_shown(text: str) -> None:
    found = redact(text)
    assert SECRET not in found
    assert "…" in found or "@" not in found
    assert redact(found) == found
    assert SECRET not in str(redact_all({"a": [text, {"b": (text,)}]}))
    for error in (SourceError(f"it failed: {text}"), RecordError(text, 1, text, text)):
        assert SECRET not in str(error)
        assert SECRET not in str(pickle.loads(pickle.dumps(error)))


@pytest.mark.parametrize("token", ["hf_" + "a" * 34, "ghp_" + "a" * 36, "AKIA" + "A" * 16, "sk-" + "a" * 40])
def test_a_token_is_known_by_its_form(token: str) -> None:
    assert redact(f"401 for {token}, twice") == "401 for …, twice"


@pytest.mark.parametrize(
    "command",
    [
        ["--hf-token", SECRET],
        ["--hf_token", SECRET],
        ["--hfToken", SECRET],
        [f"--hf-token={SECRET}"],
        [f"--password={SECRET} with words"],
        ["--key", SECRET],
        ["--auth", SECRET],
        ["--passwd", SECRET],
        ["-token", SECRET],
        ["--credential", SECRET],
        ["--api-keys", SECRET],
        [f"HF_TOKEN={SECRET}"],
        ["--env", f"HF_TOKEN={SECRET}"],
        [f"--env=HF_TOKEN={SECRET}"],
        [f"trainer.logger.api_key={SECRET}"],
        [f"+wandb.key={SECRET}"],
        ["--header", f"Authorization: Bearer {SECRET}"],
        ["--data", f"https://me:{SECRET}@host/a"],
        [f"--data=s3://me:{SECRET}@bucket/a"],
        ["--storage", f'{{"secret": "{SECRET}"}}'],
    ],
)
def test_no_secret_of_a_command_line_is_shown(command: list[str]) -> None:
    found = redact_command(["train.py", *command, "--lr", "0.1"])
    assert SECRET not in str(found)
    assert (found[0], found[-2:]) == ("train.py", ("--lr", "0.1"))
    assert redact_command(found) == found


def test_what_is_no_secret_stays() -> None:
    command = [
        "-m",
        "train",
        "--tokenizer",
        "bpe",
        "--max-tokens",
        "512",
        "--eos-token",
        "</s>",
        "--use-auth",
        "--lr",
        "1",
    ]
    command += ["-p", "a name of one letter says nothing"]
    command += ["--token-file", "a.txt", "--sort-by=key", "--data", "s3://bucket/a=b/c", "epochs=3", "--key-size", "64"]
    assert redact_command(command) == tuple(command)
    for text in (
        "max_tokens=512 and num_keys=3 of cache_key=7",
        "SyntaxError: unexpected token: x",
        "{'key': 'a/b', 'label': 3}",
        "the password is wrong; set HF_TOKEN, or FSSPEC_GS_TOKEN=anon for public files",
        "a?b=c.tar is a file here",
        "see (http://host:80/a@b).",
    ):
        assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    ["a=" * 20_000, "--a " * 20_000, "token" * 20_000, "http://a" * 5_000, "http://" + "a:" * 10_000, "key='" * 9_000],
)
def test_a_long_text_costs_no_more_than_its_length(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = redact(text)  # would take minutes, and the test would be ended
    assert len(found) <= len(text) + 2


OSC8, OSC52, CSI = "\x1b]8;;http://evil\x07text\x1b]8;;\x07", "\x1b]52;c;AAAA\x07", "\x1b[2J\x1b[31m"


HOSTILE = [
    OSC8,
    OSC52,
    CSI,
    "\x9b31m",
    "\x9d8;;x\x9c",
    "good\rbad",
    "a\x08b",
    "\x1bP1$r\x1b\\",
    "\udcff",
    "\x00",
    "\x7f",
]
HOSTILE += ["\u202egnp.exe", "\u2066x\u2069", "a\u200fb", "\u2028x"]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_controls_a_terminal(text: str) -> None:
    for found in (
        printable(f"é {text} x\n"),
        shown(text),
        str(SourceError(text)),
        str(RecordError(text, 1, text, text)),
    ):
        assert all(one.isprintable() or one == "\n" for one in found)
        found.encode()
    assert printable(f"é {text} x\n").startswith("é ")


def test_no_record_begins_a_line_of_its_own() -> None:
    assert "\n" not in str(RecordError("a\nb", 1, "c\nd", "e\npenstock: all is well"))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o027, 0o640), (0o002, 0o664)])
def test_a_file_is_as_private_as_the_umask_says(
    tmp_path: Path, umask: int, mode: int, request: pytest.FixtureRequest
) -> None:
    import os

    before = os.umask(umask)
    request.addfinalizer(lambda: os.umask(before))
    write_text_atomic(tmp_path / "run.json", "{}", "--json FILE")
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == mode
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
