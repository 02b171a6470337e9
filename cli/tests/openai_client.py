"""Drives a running server with OpenAI's own client, as its users do.

Usage: openai_client.py BASE_URL MODEL_NAME (see scripts/openai_check.sh, which starts the server and installs the client).
"""

import concurrent.futures
import math
import sys

import openai

base_url, model = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "Name three colours of the rainbow."}]


def refused(kind, param, **fields):
    """The server refuses these fields and names the one at fault."""
    try:
        client.chat.completions.create(**{"model": model, "messages": ASK, "max_tokens": 4, **fields})
    except kind as error:
        assert param is None or error.param == param, (fields, error)
        return error
    raise AssertionError(f"not refused: {fields}")


# Models.
assert [entry.id for entry in client.models.list()] == [model]
assert client.models.retrieve(model).owned_by == "deepspec"

# Chat, whole and streamed: the same text at temperature 0.
whole = client.chat.completions.create(model=model, messages=ASK, max_tokens=40, temperature=0)
text = whole.choices[0].message.content
assert text and whole.choices[0].finish_reason in ("stop", "length"), whole
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
details = whole.usage.completion_tokens_details
assert details.accepted_prediction_tokens >= 0 and details.rejected_prediction_tokens >= 0
parts, usage, finish = [], None, None
for chunk in client.chat.completions.create(
    model=model, messages=ASK, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
):
    usage = chunk.usage or usage
    for choice in chunk.choices:
        parts.append(choice.delta.content or "")
        finish = choice.finish_reason or finish
assert "".join(parts) == text and "\ufffd" not in text, (parts, text)
assert usage.completion_tokens == whole.usage.completion_tokens and finish == whole.choices[0].finish_reason

# Parts of a message, a system message, the newer name of the budget.
parted = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
assert client.chat.completions.create(model=model, messages=parted, max_completion_tokens=3).usage.completion_tokens <= 3

# Stop texts end the answer before them, streamed or not.
stop = text[8:12]
stopped = client.chat.completions.create(model=model, messages=ASK, max_tokens=40, temperature=0, stop=[stop, "\0"])
assert stopped.choices[0].message.content == text[: text.index(stop)], (stop, stopped)
assert stopped.choices[0].finish_reason == "stop"
streamed = client.chat.completions.create(model=model, messages=ASK, max_tokens=40, temperature=0, stop=stop, stream=True)
assert "".join(c.choices[0].delta.content or "" for c in streamed) == text[: text.index(stop)]

# Log probabilities of the model.
scored = client.chat.completions.create(
    model=model, messages=ASK, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
)
entries = scored.choices[0].logprobs.content
assert len(entries) <= 8 and all(len(entry.top_logprobs) == 3 for entry in entries)
for entry in entries:
    assert entry.logprob == entry.top_logprobs[0].logprob and bytes(entry.bytes).decode() == entry.token
    assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001

# Several answers; a seed gives them again, alone or beside others.
def sample():
    answers = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=16, temperature=1.0, top_p=0.95, seed=7, n=3, frequency_penalty=0.5
    )
    return [choice.message.content for choice in sorted(answers.choices, key=lambda choice: choice.index)]


first = sample()
assert len(first) == 3 and len(set(first)) > 1, first
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert all(again == first for again in pool.map(lambda _: sample(), range(4)))

# Completions: texts, tokens, log probabilities, biases.
done = client.completions.create(model=model, prompt=["One, two,", "A, B,"], max_tokens=6, temperature=0, logprobs=2)
assert len(done.choices) == 2 and len(done.choices[0].logprobs.tokens) == 6
again = client.completions.create(model=model, prompt="One, two,", max_tokens=6, temperature=0)
assert again.choices[0].text == done.choices[0].text
assert "".join(p.choices[0].text for p in client.completions.create(
    model=model, prompt="One, two,", max_tokens=6, temperature=0, stream=True)) == again.choices[0].text
biased = client.completions.create(model=model, prompt=[[504, 6147]], max_tokens=4, temperature=0, logit_bias={"314": 100})
assert biased.choices[0].text == " is" * 4, biased

# A client that leaves in the middle.
for chunk in client.chat.completions.create(model=model, messages=ASK, max_tokens=500, stream=True):
    if chunk.choices[0].delta.content:
        break

# Refusals.
refused(openai.BadRequestError, "temperature", temperature=9)
refused(openai.BadRequestError, "messages", messages=[])
refused(openai.BadRequestError, "messages", max_tokens=10_000_000)
refused(openai.BadRequestError, "tools", tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
refused(openai.BadRequestError, "nonsense", extra_body={"nonsense": 1})
assert refused(openai.NotFoundError, "model", model="gpt-0").code == "model_not_found"
try:
    openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).models.list()
    raise AssertionError("a wrong key was taken")
except openai.AuthenticationError as error:
    assert error.code == "invalid_api_key"

print("the openai client is content")
