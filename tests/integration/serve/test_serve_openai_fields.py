"""The fields of the OpenAI API and of common extensions, against plain onnxruntime and the documentation of the API."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from decoder_support import PlainDecoder, log_softmax
from local_server import LocalServer
from served_decoders import words_of

PROMPT = [2, 3, 4]
GREEDY = {"model": "llama", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
USER = [{"role": "user", "content": "w2"}]


def complete(client: Any, **fields: Any) -> Any:
    """Return the first choice of a completion; fields that the client does not know are sent, too."""
    known = {"echo", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "seed", "n", "stop", "best_of"}
    own = {name: fields.pop(name) for name in [*fields] if name not in {*known, *GREEDY, "top_p"}}
    return client.completions.create(**GREEDY | fields, extra_body=own).choices[0]


NEUTRAL: dict[str, Any] = {
    "ignore_eos": False,
    "min_p": 0,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "stop_token_ids": [],
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "include_stop_str_in_output": False,
    "modalities": ["text"],
    "top_k": -1,
    "repetition_penalty": 1,
    "typical_p": 1.0,
    "guided_json": None,
    "truncate_prompt_tokens": None,
    "priority": 0,
    "cache_salt": "x",
    "user": "me",
    "max_tokens": 12.0,
    "best_of": 1,
}


def test_defaults_of_common_servers_change_nothing(client: Any, plain: PlainDecoder) -> None:
    """What clients of vLLM and others send by default is accepted, all at once and one by one."""
    expected = words_of(plain.generate(PROMPT, 12))
    for fields in (NEUTRAL, *({name: value} for name, value in NEUTRAL.items())):
        assert complete(client, **fields).text == expected, fields


def test_defaults_of_chats_change_nothing(client: Any) -> None:
    """The same for fields of chats."""
    given = {"model": "llama", "messages": USER, "temperature": 0, "max_tokens": 5}
    expected = client.chat.completions.create(**given).choices
    for fields in (
        {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "echo": False},
        {"chat_template_kwargs": {}, "documents": [], "verbosity": "medium", "top_logprobs": 0, "logprobs": False},
        {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "tools": [], "min_p": None, "user": "one"},
    ):
        assert client.chat.completions.create(**given, extra_body=fields).choices == expected, fields


def test_end_tokens(client: Any, plain: PlainDecoder) -> None:
    """A text ends at the model's end tokens unless they are ignored, and at those of the request, which it omits."""
    tokens = plain.generate(PROMPT, 12)
    assert tokens.index(tokens[2]) == 2
    ended = complete(client, model="ending")
    assert (ended.text, ended.finish_reason) == (words_of(tokens[:2]), "stop")
    ignored = complete(client, model="ending", ignore_eos=True)
    assert (ignored.text, ignored.finish_reason) == (words_of(tokens), "length")
    first = complete(client, model="ending", ignore_eos=True, stop_token_ids=[tokens[1]])
    assert (first.text, first.finish_reason) == (words_of(tokens[: tokens.index(tokens[1])]), "stop")
    for unknown in (60, -1, -(10**20), 10**20):
        assert complete(client, model="ending", stop_token_ids=[unknown]).text == words_of(tokens[:2])


def test_the_least_number_of_tokens(client: Any) -> None:
    """A text has at least as many tokens as it is asked for, unless that exceeds the most tokens."""
    late = complete(client, model="ending", min_tokens=7)
    assert len(late.text.split()) >= 7
    with pytest.raises(openai.BadRequestError, match="min_tokens: expected at most 12") as refused:
        complete(client, min_tokens=13)
    assert refused.value.param == "min_tokens"


def test_penalties_and_biases(client: Any, plain: PlainDecoder) -> None:
    """Scores change by the formula in the documentation of the API: mu - c * frequency - (c > 0) * presence + bias."""
    ids, counts, bias = [*PROMPT], np.zeros(61), np.zeros(61)
    bias[7] = 0.5
    for _ in range(12):
        ids.append(int(np.argmax(plain.scores(ids)[-1] + bias - counts * 0.4 - (counts > 0) * 0.7)))
        counts[ids[-1]] += 1
    found = complete(client, frequency_penalty=0.4, presence_penalty=0.7, logit_bias={"7": 0.5})
    assert found.text == words_of(ids[3:])
    assert found.text != words_of(plain.generate(PROMPT, 12))
    assert complete(client, logit_bias={"9": 100}, temperature=1.0).text == words_of([9] * 12)


def test_filters_that_leave_one_token_are_greedy(client: Any, plain: PlainDecoder) -> None:
    """The most probable token always remains."""
    for fields in ({"min_p": 1.0}, {"top_p": 0}, {"top_k": 1}):
        assert complete(client, temperature=1.0, **fields).text == words_of(plain.generate(PROMPT, 12)), fields


def test_negative_seeds(client: Any) -> None:
    """The API has signed seeds: equal ones give equal texts, others other texts."""
    texts = [complete(client, seed=seed, temperature=1.5).text for seed in (-1, -1, -2, 1, -(2**63))]
    assert texts[0] == texts[1]
    assert len({*texts}) == 4


def test_a_completion_begins_with_its_prompt_if_wanted(client: Any, plain: PlainDecoder) -> None:
    """Prompts are texts or tokens, and those of a stream come before the first token of their choice."""
    rest = words_of(plain.generate(PROMPT, 12))
    assert complete(client, echo=True).text == "w2 w3 w4" + rest
    given = {"model": "llama", "prompt": ["w2 w3 w4", "w5"], "temperature": 0, "max_tokens": 12, "echo": True}
    whole = client.completions.create(**given)
    assert whole.choices[0].text == "w2 w3 w4" + rest
    assert whole.choices[1].text == "w5" + words_of(plain.generate([5], 12))
    assert whole.usage.completion_tokens == 24
    streamed = ["", ""]
    for chunk in client.completions.create(**given, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in whole.choices]
    with pytest.raises(openai.BadRequestError, match="echo: not supported together with logprobs"):
        complete(client, echo=True, logprobs=0)


def test_the_best_of_as_many_choices_as_there_are(client: Any) -> None:
    """It is no selection; one of more choices is not implemented."""
    given = {"model": "llama", "prompt": PROMPT, "max_tokens": 2, "n": 2}
    assert len(client.completions.create(**given, best_of=2).choices) == 2
    with pytest.raises(openai.BadRequestError, match="best_of: not supported"):
        client.completions.create(**given, best_of=3)


def test_variables_of_the_chat_template(client: Any) -> None:
    """A request sets variables that its model's template has, and decides whether the text of the chat is open."""
    given = {"model": "thinking", "messages": USER, "max_tokens": 1}

    def tokens(**fields: Any) -> int:
        return int(client.chat.completions.create(**given, extra_body=fields).usage.prompt_tokens)

    assert tokens() == tokens(chat_template_kwargs={"enable_thinking": True}) == 3
    assert tokens(chat_template_kwargs={"enable_thinking": False}) == 5
    assert tokens(add_generation_prompt=False) == 2
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs: 'messages' is not a variable of its own"):
        tokens(chat_template_kwargs={"messages": []})


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_probabilities_of_a_completion(client: Any, plain: PlainDecoder, temperature: float) -> None:
    """They are the logarithms of the model's softmax, by tokens as texts, with their places in the text."""
    choice = complete(client, logprobs=2, temperature=temperature, seed=1, frequency_penalty=0.5)
    tokens = [int(word[1:]) for word in choice.text.split()]
    found = choice.logprobs
    assert found.tokens == [f" w{token}" for token in tokens]
    assert found.text_offset == [len(words_of(tokens[:at])) for at in range(12)]
    for at, scores in enumerate(plain.scores([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]):
        expected = log_softmax(scores)
        assert found.token_logprobs[at] == pytest.approx(expected[tokens[at]], abs=1e-4)
        best = {f" w{token}": expected[token] for token in [*np.argsort(-expected)[:2], tokens[at]]}
        assert found.top_logprobs[at] == pytest.approx(best, abs=1e-4)
    assert complete(client).logprobs is None
    assert [len(top) for top in complete(client, logprobs=0).logprobs.top_logprobs] == [1] * 12


def test_probabilities_of_a_chat(client: Any, plain: PlainDecoder) -> None:
    """Each token has its text, its bytes, and as many others as wanted, the most probable first."""
    given = {"model": "llama", "messages": USER, "max_tokens": 6, "temperature": 0, "logprobs": True}
    choice = client.chat.completions.create(**given, top_logprobs=3).choices[0]
    prompt = [1, 5, 2, 6]
    tokens = plain.generate(prompt, 6)
    assert choice.message.content == words_of(tokens)
    for token, entry, scores in zip(
        tokens, choice.logprobs.content, plain.scores([*prompt, *tokens])[len(prompt) - 1 : -1], strict=True
    ):
        expected = log_softmax(scores)
        assert (entry.token, bytes(entry.bytes).decode()) == (f" w{token}", f" w{token}")
        assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
        assert [top.token for top in entry.top_logprobs] == [f" w{other}" for other in np.argsort(-expected)[:3]]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(np.sort(expected)[:-4:-1], abs=1e-4)
    bare = client.chat.completions.create(**given).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in bare] == [[]] * 6


@pytest.mark.parametrize("stop", [None, " w"])
def test_probabilities_of_streams_are_those_of_whole_answers(client: Any, stop: str | None) -> None:
    """Each document has those of the tokens that begin in its text, and together they have all of them."""
    given = {**GREEDY, "logprobs": 2, "n": 2, "temperature": 1, "seed": 3, "stop": stop}
    for choice in client.completions.create(**given).choices:
        tokens: list[str] = []
        offsets: list[int] = []
        text = ""
        for chunk in client.completions.create(**given, stream=True):
            piece = chunk.choices[0]
            if piece.index == choice.index and piece.logprobs is not None:
                tokens += piece.logprobs.tokens
                offsets += piece.logprobs.text_offset
            text += piece.text if piece.index == choice.index else ""
        assert text == choice.text
        if stop is None:
            assert (tokens, offsets) == (choice.logprobs.tokens, choice.logprobs.text_offset)
        else:
            assert (tokens, choice.logprobs, text) == ([], None, "")


def test_numbers_of_tokens_in_streams(client: Any) -> None:
    """They come last if they are asked for, and in each document if that is asked for, too, as in vLLM."""
    given = {"model": "llama", "prompt": PROMPT, "max_tokens": 5, "stream": True}
    last = [*client.completions.create(**given, stream_options={"include_usage": True})]
    assert [chunk.usage is None for chunk in last] == [True] * (len(last) - 1) + [False]
    options = {"include_usage": True, "continuous_usage_stats": True}
    each = [chunk.usage for chunk in client.completions.create(**given, stream_options=options)]
    assert [usage.completion_tokens for usage in each] == [1, 2, 3, 4, 5, 5, 5]
    assert {usage.prompt_tokens for usage in each} == {3}
    assert all(chunk.usage is None for chunk in client.completions.create(**given))


def test_bytes_of_tokens_are_the_text(client: Any) -> None:
    """The bytes of all tokens together are the text, also of parts of characters; special tokens have none."""
    given = {"model": "bytes", "messages": [{"role": "user", "content": "é"}], "max_tokens": 150, "seed": 5}
    choice = client.chat.completions.create(**given, logprobs=True, temperature=2.0).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 150
    special = [entry for entry in entries if entry.bytes is None]
    assert special
    assert all(entry.token.startswith("<|") for entry in special)
    data = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert data.decode(errors="replace") == choice.message.content
    streamed = client.chat.completions.create(**given, logprobs=True, temperature=2.0, stream=True)
    found = [entry for chunk in streamed if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert found == entries


def test_wrong_fields_are_refused(decoders: LocalServer) -> None:
    """The error has the field at fault, of which the message begins with the name."""
    for fields, param in (
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "0"}, "frequency_penalty"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99": 1}}, "logit_bias"),
        ({"logit_bias": [7]}, "logit_bias"),
        ({"min_p": 1.5}, "min_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": 1e400}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": ["w1", None]}, "stop"),
        ({"stop_token_ids": ["w1"]}, "stop_token_ids"),
        ({"ignore_eos": "true"}, "ignore_eos"),
        ({"stream_options": "x"}, "stream_options"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"length_penalty": True}, "length_penalty"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"seed": 0.5}, "seed"),
        ({"temperature": -1}, "temperature"),
        ({"prompt": [99]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"n": 0}, "n"),
    ):
        status, document, _ = decoders.get("/v1/completions", GREEDY | fields)
        error = document["error"]
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error"), fields
        assert error["message"].startswith((param, "prompt, n:")), fields


def test_wrong_fields_of_chats_are_refused(decoders: LocalServer) -> None:
    """The same for fields of chats."""
    given = {"model": "llama", "messages": USER, "max_tokens": 2}
    for fields, param in (
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "other", "content": ""}]}, "messages"),
    ):
        status, document, _ = decoders.get("/v1/chat/completions", given | fields)
        assert (status, document["error"]["param"]) == (400, param), (fields, document)
