"""The real OpenAI Python client against the gateway (tests/gateway/fake_server.cpp), field by field.

usage: openai_client_test.py FAKE_SERVER. Written against openai 3.57.0. Every function whose name begins with `check_` is one
subject; all run, in the order of the file, and any failure fails the script.
"""
import asyncio
import json
import subprocess
import sys
import time
import traceback

import openai

TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]
MODEL = "any name"


def said(text):
    return [{"role": "user", "content": text}]


def equal(got, want):
    assert got == want, f"{got!r} is not {want!r}"


class Fixture:
    def __init__(self, program):
        self.server = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        port, full_port, self.key = self.server.stdout.readline().split()
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self.client = openai.OpenAI(base_url=self.base_url, api_key=self.key)
        self.full = openai.OpenAI(base_url=f"http://127.0.0.1:{full_port}/v1", api_key=self.key)
        self.ids = set()

    def facts(self):
        """Generations the worker was asked for, and how many of them were cancelled."""
        self.server.stdin.write("\n")
        self.server.stdin.flush()
        return [int(x) for x in self.server.stdout.readline().split()]

    def create(self, text, **fields):
        return self.client.chat.completions.create(**{"model": MODEL, "messages": said(text), **fields})

    def whole(self, text, **fields):
        """One answer that is not streamed; what every such answer must have is checked."""
        answer = self.create(text, **fields)
        self.check_head(answer, "chat.completion")
        assert answer.id not in self.ids, "an id came twice"
        self.ids.add(answer.id)
        equal([c.index for c in answer.choices], list(range(fields.get("n", 1))))
        for choice in answer.choices:
            equal(choice.message.role, "assistant")
            equal(choice.message.refusal, None)
        self.check_usage(answer.usage)
        return answer

    def streamed(self, text, **fields):
        """The chunks of one streamed answer, put together by index; what every stream must be is checked."""
        chunks = list(self.create(text, stream=True, stream_options={"include_usage": True}, **fields))
        n = fields.get("n", 1)
        out = [{"content": "", "calls": {}, "finish": None, "logprobs": [], "roles": [], "pieces": 0} for _ in range(n)]
        for chunk in chunks:
            self.check_head(chunk, "chat.completion.chunk")
            equal((chunk.id, chunk.created), (chunks[0].id, chunks[0].created))
            for choice in chunk.choices:
                one = out[choice.index]
                assert one["finish"] is None, "something came after the finish"
                one["finish"] = choice.finish_reason
                one["content"] += choice.delta.content or ""
                one["pieces"] += bool(choice.delta.content)
                one["roles"] += [choice.delta.role] if choice.delta.role else []
                one["logprobs"] += choice.logprobs.content if choice.logprobs else []
                for call in choice.delta.tool_calls or []:
                    whole = one["calls"].setdefault(call.index, {"id": call.id, "type": call.type, "name": call.function.name, "arguments": ""})
                    whole["arguments"] += call.function.arguments
        assert chunks[0].id not in self.ids, "an id came twice"
        self.ids.add(chunks[0].id)
        equal([c.usage is not None for c in chunks], [False] * (len(chunks) - 1) + [True])
        equal(chunks[-1].choices, [])
        equal([one["roles"] for one in out], [["assistant"]] * n)
        self.check_usage(chunks[-1].usage)
        return out, chunks[-1].usage

    @staticmethod
    def check_head(answer, kind):
        equal((answer.object, answer.model, answer.system_fingerprint), (kind, MODEL, "temper"))
        assert answer.id.startswith("chatcmpl-") and len(answer.id) > len("chatcmpl-"), answer.id
        assert abs(answer.created - time.time()) < 60, answer.created

    @staticmethod
    def check_usage(usage):
        assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
        equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        equal(usage.prompt_tokens_details.cached_tokens, 3)  # as the worker says
        equal(usage.completion_tokens_details.reasoning_tokens, 0)

    def refused(self, kind, status, code, call, param=None, retried=False):
        """`call` must raise exactly this class, and reach no worker unless `retried`."""
        before = self.facts()[0]
        try:
            call()
        except openai.APIStatusError as e:
            equal(type(e), kind)
            equal((e.status_code, e.code, e.param), (status, code, param))
            equal(set(e.body), {"message", "type", "param", "code"})
            assert e.body["message"] and e.body["type"], e.body
            if not retried:
                equal(self.facts()[0], before)
            return e
        raise AssertionError(f"no {kind.__name__}")

    def wait_cancelled(self, before):
        for _ in range(100):
            asked, cancelled = (now - then for now, then in zip(self.facts(), before))
            if asked == cancelled > 0:
                return asked
            time.sleep(0.05)
        raise AssertionError("the worker was not told")


def check_models(f):
    models = f.client.models.list()
    equal(models.object, "list")
    equal([(m.id, m.object, m.owned_by) for m in models.data], [("policy", "model", "temper")])
    equal(f.client.models.retrieve("policy").id, "policy")
    f.refused(openai.NotFoundError, 404, "model_not_found", lambda: f.client.models.retrieve("other"), param="model")


def check_whole_answer(f):
    answer = f.whole("héllo")
    choice = answer.choices[0]
    equal((choice.message.content, choice.finish_reason), ("you said: héllo", "stop"))
    equal((choice.message.tool_calls, choice.logprobs), (None, None))
    equal(answer.usage.completion_tokens, len("you said: héllo".encode()) + 1)  # bytes, and the end of the turn


def check_token_ids_agree_with_usage(f):
    answer = f.whole("ids", extra_body={"return_token_ids": True})
    equal(len(answer.prompt_token_ids), answer.usage.prompt_tokens)
    equal(len(answer.choices[0].token_ids), answer.usage.completion_tokens)
    equal(bytes(answer.choices[0].token_ids[:-1]).decode(), answer.choices[0].message.content)


def check_tool_call_and_its_echo(f):
    messages = said("call ls -l")
    first = f.whole(None, messages=messages, tools=TOOLS, temperature=0.3)
    choice = first.choices[0]
    equal((choice.finish_reason, choice.message.content), ("tool_calls", "café "))
    equal(len(choice.message.tool_calls), 1)
    call = choice.message.tool_calls[0]
    equal((call.type, call.function.name, json.loads(call.function.arguments)), ("function", "shell", {"command": "ls -l"}))
    assert call.id, call
    # Given back the way a program dumps it: the conversation goes on from the very tokens.
    messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "a.txt"}]
    second = f.whole(None, messages=messages, tools=TOOLS)
    equal((second.choices[0].message.content, second.choices[0].finish_reason), ("you said: a.txt", "stop"))
    assert second.usage.prompt_tokens > first.usage.total_tokens, second.usage


def check_parallel_tool_calls(f):
    message = f.whole("calls pwd", tools=TOOLS, parallel_tool_calls=True).choices[0].message
    equal(message.content, None)
    equal([json.loads(c.function.arguments)["command"] for c in message.tool_calls], ["pwd", "second pwd"])
    equal(len({c.id for c in message.tool_calls}), 2)
    out, _ = f.streamed("calls pwd", tools=TOOLS)
    equal(out[0]["finish"], "tool_calls")
    equal(sorted(out[0]["calls"]), [0, 1])
    equal([json.loads(out[0]["calls"][i]["arguments"])["command"] for i in (0, 1)], ["pwd", "second pwd"])
    equal(len({c["id"] for c in out[0]["calls"].values()}), 2)
    equal({(c["type"], c["name"]) for c in out[0]["calls"].values()}, {("function", "shell")})


def check_n(f):
    answer = f.whole("twins", n=3)
    equal([(c.message.content, c.finish_reason) for c in answer.choices], [("you said: twins", "stop")] * 3)
    equal(answer.usage.completion_tokens, 3 * (len("you said: twins") + 1))
    out, usage = f.streamed("twins", n=3)
    equal([(o["content"], o["finish"]) for o in out], [("you said: twins", "stop")] * 3)
    equal(usage.completion_tokens, answer.usage.completion_tokens)


def check_stop_and_length(f):
    # The text ends before the stop string; the tokens with the one that completes it.
    for stop in ("said", ["nothing", "said"]):
        answer = f.whole("x", stop=stop)
        equal((answer.choices[0].message.content, answer.choices[0].finish_reason), ("you ", "stop"))
        equal(answer.usage.completion_tokens, len("you said"))
    out, usage = f.streamed("x", stop=["said"])
    equal((out[0]["content"], out[0]["finish"], usage.completion_tokens), ("you ", "stop", len("you said")))
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = f.whole("x", **limit)
        equal((answer.choices[0].message.content, answer.choices[0].finish_reason), ("you s", "length"))
        equal(answer.usage.completion_tokens, 5)


def check_streams_say_what_whole_answers_say(f):
    for text in ("héllo", "call pwd"):
        answer = f.whole(text, tools=TOOLS, logprobs=True)
        out, usage = f.streamed(text, tools=TOOLS, logprobs=True)
        choice, one = answer.choices[0], out[0]
        equal((one["content"], one["finish"]), (choice.message.content, choice.finish_reason))
        equal([(c["type"], c["name"], c["arguments"]) for c in one["calls"].values()],
              [(c.type, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []])
        equal([t.model_dump() for t in one["logprobs"]], [t.model_dump() for t in choice.logprobs.content])
        equal(usage.model_dump(), answer.usage.model_dump())
    assert f.streamed("héllo")[0][0]["pieces"] > 3, "the text came in one piece"


def check_logprobs(f):
    answer = f.whole("call x", tools=TOOLS, logprobs=True)
    tokens = answer.choices[0].logprobs.content
    equal(len(tokens), answer.usage.completion_tokens - 1)  # without the end of the turn
    equal([t.logprob for t in tokens], [-0.25 * (i % 4) for i in range(len(tokens))])  # as the worker drew them
    equal([t.top_logprobs for t in tokens], [[]] * len(tokens))
    text = b"".join(bytes(t.bytes) for t in tokens).decode()
    equal(text, "café <tool_call>{\"name\":\"shell\",\"arguments\":{\"command\":\"x\"}}</tool_call>")


def check_the_clients_own_assembler(f):
    with f.client.chat.completions.stream(model=MODEL, messages=said("call pwd"), tools=TOOLS, logprobs=True) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert {"chunk", "content.delta", "tool_calls.function.arguments.done"} <= kinds, kinds
    equal((final.message.content, final.finish_reason), ("café ", "tool_calls"))
    equal(json.loads(final.message.tool_calls[0].function.arguments), {"command": "pwd"})


def check_the_asynchronous_client(f):
    async def talk():
        async with openai.AsyncOpenAI(base_url=f.base_url, api_key=f.key) as client:
            answers = await asyncio.gather(*[client.chat.completions.create(model=MODEL, messages=said(f"at once {i}")) for i in range(4)])
            stream = await client.chat.completions.create(model=MODEL, messages=said("stream"), stream=True)
            return [a.choices[0].message.content for a in answers], "".join([c.choices[0].delta.content or "" async for c in stream])
    equal(asyncio.run(talk()), ([f"you said: at once {i}" for i in range(4)], "you said: stream"))


def check_refused_requests(f):
    bad = openai.BadRequestError
    f.refused(bad, 400, "unsupported_parameter", lambda: f.create("x", tools=TOOLS, tool_choice="required"), param="tool_choice")
    f.refused(bad, 400, "unsupported_parameter", lambda: f.create("x", logprobs=True, top_logprobs=3), param="top_logprobs")
    f.refused(bad, 400, "unsupported_parameter", lambda: f.create("x", response_format={"type": "json_object"}), param="response_format")
    f.refused(bad, 400, "context_length_exceeded", lambda: f.create("y" * 30000), param="messages")
    f.refused(bad, 400, None, lambda: f.create("x", temperature="hot"), param="temperature")
    f.refused(bad, 400, None, lambda: f.create("x", n=9), param="n")
    f.refused(bad, 400, None, lambda: f.create("x", messages=[]), param="messages")
    f.refused(bad, 400, None, lambda: f.create("x", messages=[{"role": "king", "content": "x"}]), param="messages[0].role")
    f.refused(openai.AuthenticationError, 401, "invalid_api_key", lambda: f.client.with_options(api_key="sk-wrong").models.list())
    f.refused(openai.NotFoundError, 404, "unknown_url", lambda: f.client.responses.create(model=MODEL, input="x"))
    f.refused(openai.APIStatusError, 413, "request_too_large", lambda: f.create("y" * (2 << 20)))


def check_a_full_queue(f):
    # Waits as the answer says, tries again as often as it was told, then gives the client's own class.
    begin = time.monotonic()
    create = f.full.with_options(max_retries=2).chat.completions.create
    error = f.refused(openai.RateLimitError, 429, "queue_full", lambda: create(model=MODEL, messages=said("x")))
    assert error.response.headers["retry-after-ms"] == "500" and 0.9 < time.monotonic() - begin < 10


def check_a_worker_that_breaks(f):
    broken = openai.InternalServerError
    f.refused(broken, 502, "worker_error", lambda: f.create("fail"), retried=True)
    f.refused(broken, 503, "overloaded", lambda: f.client.with_options(max_retries=0).chat.completions.create(model=MODEL, messages=said("away")),
              retried=True)
    # After the head of a stream an error can only come as an event.
    text = ""
    try:
        for chunk in f.create("fail", stream=True):
            text += chunk.choices[0].delta.content or ""
    except openai.APIError as e:
        equal((type(e), e.code), (openai.APIError, "worker_error"))
    else:
        raise AssertionError("the stream ended as if it were whole")
    assert 0 < len(text) <= 12, text


def check_clients_that_leave(f):
    # A timeout: the worker is told; the client's marked retry joins the call or follows it, and draws no twin that lives on.
    before = f.facts()
    try:
        f.client.with_options(timeout=0.3, max_retries=1).chat.completions.create(model=MODEL, messages=said("long"))
        raise AssertionError("no timeout")
    except openai.APITimeoutError:
        pass
    f.wait_cancelled(before)
    # In the middle of a stream.
    before = f.facts()
    stream = f.create("long", stream=True)
    seen = [next(stream) for _ in range(5)]
    equal(seen[-1].choices[0].finish_reason, None)
    stream.close()
    equal(f.wait_cancelled(before), 1)


def check_the_end_of_a_session(f):
    def until_refused():
        for _ in range(100):
            before = f.facts()[0]
            f.create("x")
            equal(f.facts()[0], before + 1)
    f.refused(openai.BadRequestError, 400, "rollout_limit:turns", until_refused, retried=True)
    f.server.stdin.write("s")
    f.server.stdin.flush()
    equal(f.server.stdout.readline(), "sealed\n")
    f.refused(openai.APIStatusError, 410, "session_closed", lambda: f.create("x"))
    f.server.stdin.close()
    equal(f.server.wait(10), 0)


def main():
    fixture = Fixture(sys.argv[1])
    checks = [(name, check) for name, check in globals().items() if name.startswith("check_")]
    failed = 0
    for name, check in checks:
        try:
            check(fixture)
            print("ok    ", name, flush=True)
        except Exception:  # the next subject is worth a look all the same
            failed += 1
            print("FAILED", name, flush=True)
            traceback.print_exc()
    fixture.server.kill()
    print(f"{len(checks) - failed} of {len(checks)} subjects pass, openai {openai.__version__}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
