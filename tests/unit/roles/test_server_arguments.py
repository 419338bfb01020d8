"""Arguments for vLLM's server, as its own parser takes them."""

from importlib.util import find_spec

import pytest

from pipeline.errors import ConfigError
from pipeline.inference.vllm import server_arguments
from pipeline.inference.vllm.server_arguments import check_extra_args, unchecked_arguments
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@needs_vllm
def test_vllm_s_own_parser_says_what_is_wrong_before_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_arguments, "PARSE_SECONDS", WAIT_SECONDS)  # a busy machine may need longer
    wrong = make_config(inference={"extra_args": ["--max-num-seqs", "3", "--enforce-eagre"]})
    with pytest.raises(ConfigError) as caught:
        check_extra_args(wrong)
    assert str(caught.value).startswith("inference.extra_args=['--max-num-seqs', '3', '--enforce-eagre']: expected arg")
    assert "unrecognized arguments: --enforce-eagre; see vllm serve --help=all" in str(caught.value)


@needs_vllm
@pytest.mark.trial
def test_what_vllm_takes_passes() -> None:
    right = make_config(inference={"extra_args": ["--max-num-seqs", "3", "--enforce-eager"]})
    check_extra_args(right)
    assert unchecked_arguments(right) == ""


def test_vllm_is_not_asked_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(arguments: object) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(server_arguments, "_parse_in_server", asked)
    alone = {"steps": 0, "prompts_per_step": 1, "sft": {"steps": 1}}
    for config in (make_config(), make_config(training=alone, inference={"extra_args": ["--no-such"]})):
        check_extra_args(config)
        assert unchecked_arguments(config) == ""


def test_where_vllm_cannot_be_asked_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_arguments, "PARSE_SECONDS", 0.01)
    config = make_config(inference={"extra_args": ["--headless"]})
    check_extra_args(config)
    assert "could not be checked here (vLLM's parser took longer" in unchecked_arguments(config)
