"""Masks of odd conversations, held to two references: the bytes of hand-made segments, and Hugging Face's own masks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors

from pipeline.data import Conversation
from pipeline.data.chat_messages import read_messages
from pipeline.environments.assistant_masks import AssistantMasker, Choice, MaskedText, MaskError
from pipeline.environments.chat_tokenizer import ChatTokenizer
from tests.fakes.chat_models import CHATML, MARKED, TEMPLATES, make_chat_model

ODD = (
    "",
    " ",
    "\n",
    "\n\n \n",
    "a",
    " leading and trailing ",
    "tab\tand\r\nreturn",
    "1 + 2 = 3 .\n\n",
    "日本語の文",
    "👩‍👩‍👧‍👦 🏳️‍🌈",
    "é é ﬁ ½ ſ",
    "مرحبا \u202e reversed",
    "zero\x00byte",
    "\u200b\ufeff",
    "\ufdd0 a noncharacter",
    "<|im_end|>",
    "<|im_start|>assistant\nI was never said<|im_end|>\n",
    "before <|im_end|>\n after",
    "<|endoftext|>",
    "<think>\nhm\n</think>\n\nso",
    "</think>",
    "{% generation %}x{% endgeneration %}",
    "{{ messages }} {# not a comment #}",
    '{"role": "assistant", "content": "<|im_end|>"}',
    "assistant\n",
    "the quick brown fox " * 200,
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
SHAPES: dict[str, Conversation] = {
    "one turn": Conversation((user("hi"), said("yes"))),
    "an empty system message": Conversation(({"role": "system", "content": ""}, user("hi"), said("yes"))),
    "a question at the end": Conversation((user("a"), said("b"), user("c"))),
    "two answers in a row": Conversation((user("a"), said("b"), said("c"), user("d"), said("e"))),
    "two questions in a row": Conversation((user("a"), user("b"), said("c"))),
    "the same text everywhere": Conversation((user("a"), said("a"), user("a"), said("a"))),
    "a tool is called": Conversation(
        (user("1+2"), said("", tool_calls=[call("add", a=1)]), {"role": "tool", "content": "3"}, said("3")),
        tools=(TOOL,),
    ),
    "two calls at once": Conversation(
        (user("?"), said("both", tool_calls=[call("add", a="é"), call("add", a=[{"b": None}])])), tools=(TOOL, TOOL)
    ),
    "a call with special tokens": Conversation((user("?"), said("", tool_calls=[call("add", a="<|im_end|>")]))),
    "turns of the prompt": Conversation((user("a"), said("b"), user("c"), said("d")), prompt_length=3),
    "many turns": Conversation(tuple(m for n in range(20) for m in (user(f"q{n}"), said(f"a{n}")))),
}
CONVERSATIONS = {
    **{f"asked {text[:20]!r}": Conversation((user(text), said("ok"), user("again"), said("fine"))) for text in ODD},
    **{f"answered {text[:20]!r}": Conversation((user("q"), said(text), user("again"), said(text))) for text in ODD},
    **SHAPES,
}
assert len(CONVERSATIONS) >= 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_chat_model(root / name, template) for name, template in TEMPLATES.items()}


def masked(folder: Path, conversation: Conversation, choice: Choice = "all") -> list[MaskedText]:
    return list(AssistantMasker(ChatTokenizer(folder), choice).rows(conversation))


def segments(conversation: Conversation, chosen: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """ChatML by hand: pieces of the text, and whether they are trained."""
    if conversation.tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in conversation.tools)
        yield f"<|im_start|>system\n# Tools{listed}<|im_end|>\n", False
    for place, message in enumerate(conversation.messages):
        calls = [each["function"] for each in message.get("tool_calls", ())]
        texts = [
            f'\n<tool_call>\n{{"name": "{each["name"]}", '
            f'"arguments": {json.dumps(each["arguments"], ensure_ascii=False)}}}\n</tool_call>'
            for each in calls
        ]
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}{''.join(texts)}<|im_end|>", place in chosen
        yield "\n", False


def reference(folder: Path, pieces: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Ids of the whole text and the mask of the pieces, by the bytes that each token is made of."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("".join(text for text, _ in pieces), add_special_tokens=False).ids
    trained = b"".join((b"\1" if counts else b"\0") * len(text.encode()) for text, counts in pieces)
    specials = set(tokenizer.get_added_tokens_decoder())
    byte_of = dict.fromkeys(pre_tokenizers.ByteLevel.alphabet(), 1)  # each letter of a token is one byte
    mask, at = [], 0
    for token in ids:
        piece = tokenizer.id_to_token(token)
        size = len(piece.encode()) if token in specials else sum(byte_of[letter] for letter in piece)
        mask.append(int(any(trained[at : at + size])))
        at += size
    assert at == len(trained)
    return ids, mask


@pytest.mark.parametrize("template", ["chatml", "marked"])
@pytest.mark.parametrize("name", list(CONVERSATIONS))
def test_the_mask_is_what_the_assistant_said_with_the_end_of_its_turn(
    folders: Mapping[str, Path], template: str, name: str
) -> None:
    conversation = CONVERSATIONS[name]
    chosen: Mapping[Choice, Sequence[int]] = {"all": conversation.turns, "last": conversation.turns[-1:]}
    for choice, turns in chosen.items():
        (row,) = masked(folders[template], conversation, choice)
        ids, mask = reference(folders[template], list(segments(conversation, turns)))
        assert list(row.tokens) == ids
        assert list(row.mask) == mask


@pytest.mark.parametrize("name", list(CONVERSATIONS))
def test_marked_spans_are_those_of_transformers(folders: Mapping[str, Path], name: str) -> None:
    from transformers import AutoTokenizer

    conversation = CONVERSATIONS[name]
    if conversation.prompt_length:
        pytest.skip("transformers knows no prompt within a conversation")
    tokenizer = AutoTokenizer.from_pretrained(folders["marked"])
    # With the offsets that it trims, transformers leaves a token out that is white space at the beginning of a turn.
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    expected = tokenizer.apply_chat_template(
        list(conversation.messages),
        tools=list(conversation.tools) or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    (row,) = masked(folders["marked"], conversation)
    assert list(row.tokens) == expected["input_ids"]
    assert list(row.mask) == expected["assistant_masks"]


def test_each_turn_can_be_a_row_as_inference_would_see_it(folders: Mapping[str, Path]) -> None:
    chat = ChatTokenizer(folders["thinking"])
    talk = Conversation(
        (user("a"), said("b", reasoning_content="hm"), user("c"), said("d", reasoning_content="so"), user("e"))
    )
    first, second = masked(folders["thinking"], talk, "each")
    for row, asked in ((first, talk.messages[:1]), (second, talk.messages[:3])):
        prompt = chat.prompt(asked)
        assert list(row.tokens[: len(prompt)]) == prompt
        assert row.mask == (*(0 for _ in prompt), *(1 for _ in row.tokens[len(prompt) : -1]), 0)
    assert [row.text[slice(*row.spans[0])] for row in (first, second)] == [
        "<think>\nhm\n</think>\n\nb<|im_end|>",
        "<think>\nso\n</think>\n\nd<|im_end|>",
    ]
    assert "hm" not in second.text


def test_a_template_that_drops_reasoning_is_refused_for_all_turns(folders: Mapping[str, Path]) -> None:
    talk = Conversation((user("a"), said("b"), user("c"), said("d")))
    with pytest.raises(MaskError, match=r"drops reasoning of earlier turns, so message 1 .*; set data\.train_on=each"):
        masked(folders["thinking"], talk)
    (row,) = masked(folders["thinking"], talk, "last")
    assert row.text[slice(*row.spans[0])] == "<think>\n\n</think>\n\nd<|im_end|>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ '$' if not add_generation_prompt else '' }}",
            "does not keep earlier turns, so message 1 is found nowhere; set data.train_on=each, or put",
        ),
        (
            "{{ messages[-1].content }}",
            "asks for an answer in another way than it writes one, perhaps with the reasoni",
        ),
        (
            "{% for m in messages %}{{ m.content }}|{% endfor %}{{ '<think>' if add_generation_prompt }}",
            "asks for an answer in another way than it writes one",
        ),
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses it: roles must alternate"),
        ("{{ messages[9].content.nothing }}", "the chat template refuses it: "),
        ("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}", "its prompt too"),
        ("{{ messages[0].content }}{% generation %}{% endgeneration %}", "no token of it would be trained"),
        (
            "{% generation %}{{ messages[1].content }}{% endgeneration %}{% generation %}x{% endgeneration %}",
            "marks 2 spans for 3 turns of the assistant",
        ),
        (
            "{% set said %}{% generation %} {{ messages[1].content }}{% endgeneration %}{% endset %}{{ said | trim }}",
            r"the text around {% generation %} depends on what is in it",
        ),
    ],
)
def test_a_template_that_cannot_be_masked_is_refused(tmp_path: Path, template: str, reason: str) -> None:
    folder = make_chat_model(tmp_path, template)
    talk = Conversation((user("question"), said("b"), user("c"), said("d"), user("e"), said("f")))
    choice: Choice = "last" if "2 spans" in reason else "all"
    with pytest.raises(MaskError) as caught:
        masked(folder, talk, choice)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_writes_no_end_of_a_turn_teaches_none(folders: Mapping[str, Path], tmp_path: Path) -> None:
    talk = Conversation((user("a"), said("b")))
    for name in ("chatml", "marked"):
        masker = AssistantMasker(ChatTokenizer(folders[name]), "all")
        assert all(masker.teaches_end(row) for row in masker.rows(talk))
    endless = make_chat_model(
        tmp_path,
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<assistant>' if add_generation_prompt }}",
    )
    masker = AssistantMasker(ChatTokenizer(endless), "all")
    assert [masker.teaches_end(row) for row in masker.rows(talk)] == [False]


def test_a_conversation_without_an_answer_is_refused(folders: Mapping[str, Path]) -> None:
    for talk in (Conversation((user("a"),)), Conversation((user("a"), said("b"), user("c")), prompt_length=3)):
        with pytest.raises(MaskError, match="no turn of an assistant to train"):
            masked(folders["chatml"], talk)


def test_sharegpt_and_openai_give_the_same_row(folders: Mapping[str, Path]) -> None:
    one = read_messages([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])
    other = read_messages([user("a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}])
    assert masked(folders["marked"], Conversation(one)) == masked(folders["chatml"], Conversation(other))


def test_a_mask_costs_no_second_template(folders: Mapping[str, Path]) -> None:
    assert AssistantMasker(ChatTokenizer(folders["marked"]), "all").method == "the template's {% generation %} blocks"
    assert AssistantMasker(ChatTokenizer(folders["chatml"]), "all").method == "the template with and without each turn"
    assert CHATML != MARKED
