"""What counts as a secret, and that no part of one stays."""

from pathlib import Path

import pytest

from pipeline.utils.redaction import REMOVED, Redactor, local_secrets


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("HF_TOKEN=abc at https://me:abc@host/x", "HF_TOKEN=[removed] at https://[removed]@host/x"),
        ("redis://:pa@ss@h:1/0", "redis://[removed]@h:1/0"),
        ("""{'api_key': 'abc def', "password": "x\\"y"}""", """{'api_key': [removed], "password": [removed]}"""),
        (r"{\"token\": \"abc\"}", r"{\"token\": [removed]}"),
        ('token: "cut off', "token: [removed]"),
        ('"keys_of": 1, "access_key": ["a", "b"]', '"keys_of": 1, "access_key": [removed]'),
        ("-H 'Authorization: Bearer abcdefghijk' --api-key xyz", f"-H 'Authorization: {REMOVED}' --api-key {REMOVED}"),
        ("GET /o?X-Amz-Signature=0f9c&part=1", "GET /o?X-Amz-Signature=[removed]&part=1"),
        ("a bearer abcdefgh.ijk=", "a bearer [removed]"),
        ("with hf_AbCdEfGhIjKlMnOpQr and AKIAABCDEFGHIJKLMNOP", f"with {REMOVED} and {REMOVED}"),
        ("a\n-----BEGIN RSA PRIVATE KEY-----\nQUJD\n-----END RSA PRIVATE KEY-----\nb", f"a\n{REMOVED}\nb"),
        ("QUJD\nQUJD\n-----END PRIVATE KEY-----\nb", f"{REMOVED}\nb"),
        ("-----BEGIN PRIVATE KEY-----\nQUJD", REMOVED),
    ],
)
def test_a_secret_is_removed_by_its_name_or_form(text: str, cleaned: str) -> None:
    assert Redactor().redact(text) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "training.micro_batch_tokens=4096, max_tokens: 5, whiskey: 4, keys=3",
        "pipeline/train/loop/policy_update.py:95 on node17.cluster",
        "s3://bucket/run/checkpoints and http://10.0.0.1:6379",
        "revision 89a500905b1f9a1b3bbd9f8d8b0e4c1f89a50090",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert Redactor().redact(text) == text


def test_a_known_value_is_removed_wherever_it_occurs_and_a_short_one_is_no_value() -> None:
    redactor = Redactor(["swordfish", "swordfish-2", "abc", ""])
    assert redactor.redact("xswordfish-2y swordfish abc") == f"x{REMOVED}y {REMOVED} abc"


def test_the_user_s_own_secrets_are_found_in_variables_and_files(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password from-netrc\n")
    (tmp_path / ".netrc").chmod(0o600)
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text("from-the-hub\n")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default]\naws_secret_access_key = from/aws\n")
    (tmp_path / ".git-credentials").write_text("https://user:from-git@github.com\n")
    variables = {"WANDB_API_KEY": "from-variable", "PATH": "/bin", "MY_SECRET": "mine", "HOME": str(tmp_path)}
    found = set(local_secrets(variables))
    assert {"from-variable", "mine", "from-netrc", "from-the-hub", "from/aws", "from-git"} <= found
    assert "/bin" not in found
