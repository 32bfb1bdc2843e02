"""The real OpenAI Python client against the gateway (tests/gateway/fake_server.cpp). Written against openai 3.57.0.

usage: openai_client_test.py FAKE_SERVER; exits 77 (skipped) when the openai package is not there."""

import json
import subprocess
import sys
import time

try:
    import openai
except ImportError:
    sys.exit(77)

TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]


def main():
    server = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    port, key = server.stdout.readline().split()

    def facts():
        server.stdin.write("\n")
        server.stdin.flush()
        return [int(x) for x in server.stdout.readline().split()]

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key)

    # Models.
    assert [m.id for m in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").owned_by == "temper"

    # A turn with a tool, echoed the way a program dumps it, then the answer.
    messages = [{"role": "user", "content": "call ls -l"}]
    first = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0.3)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "café "
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"command": "ls -l"}
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    messages.append(choice.message.model_dump())
    messages.append({"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "a.txt"})
    second = client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "you said: a.txt" and second.choices[0].finish_reason == "stop"
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens

    # Streams: by hand and by the client's own assembler.
    text, finish, usage = "", None, None
    for chunk in client.chat.completions.create(model="any", messages=[{"role": "user", "content": "héllo"}], stream=True,
                                                stream_options={"include_usage": True}):
        for c in chunk.choices:
            text += c.delta.content or ""
            finish = c.finish_reason or finish
        usage = chunk.usage or usage
    assert (text, finish) == ("you said: héllo", "stop") and usage.completion_tokens > 10
    with client.chat.completions.stream(model="any", messages=[{"role": "user", "content": "call pwd"}], tools=TOOLS, logprobs=True) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert final.message.content == "café " and final.finish_reason == "tool_calls"
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"command": "pwd"}
    assert b"".join(bytes(t.bytes) for t in final.logprobs.content).decode().startswith("café <tool_call>")

    # Errors are the client's own classes, with the code, and are not retried.
    def fails(kind, code, **fields):
        before = facts()[0]
        try:
            client.chat.completions.create(**{"model": "any", "messages": [{"role": "user", "content": "x"}], **fields})
        except kind as e:
            assert e.code == code, e.code
            assert facts()[0] == before
            return
        raise AssertionError("no error")

    fails(openai.BadRequestError, "unsupported_parameter", tools=TOOLS, tool_choice="required")
    fails(openai.BadRequestError, "context_length_exceeded", messages=[{"role": "user", "content": "y" * 30000}])
    wrong = client.with_options(api_key="sk-wrong")
    try:
        wrong.models.list()
        raise AssertionError("no error")
    except openai.AuthenticationError as e:
        assert e.code == "invalid_api_key"

    # A client that gives up: the worker is told, the SDK's marked retries draw no twin that lives on.
    before = facts()
    try:
        client.with_options(timeout=0.3, max_retries=1).chat.completions.create(model="any", messages=[{"role": "user", "content": "long"}])
        raise AssertionError("no timeout")
    except openai.APITimeoutError:
        pass
    for _ in range(100):
        if facts()[1] - before[1] == facts()[0] - before[0] > 0:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the worker was not cancelled")

    # The budget of turns, then the end of the session.
    try:
        for _ in range(20):
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x"}])
        raise AssertionError("no limit")
    except openai.BadRequestError as e:
        assert e.code == "rollout_limit:turns"
    server.stdin.write("s")
    server.stdin.flush()
    assert server.stdout.readline() == "sealed\n"
    try:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x"}])
        raise AssertionError("no error")
    except openai.APIStatusError as e:
        assert e.status_code == 410 and e.code == "session_closed"
    server.stdin.close()
    assert server.wait(10) == 0
    print("ok")


main()
