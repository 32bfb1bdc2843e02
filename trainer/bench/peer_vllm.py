"""vLLM on a CPU: decode, prefill, logprobs. One engine in this process, its steps taken one by one; drawn tokens come with their
log-probabilities, as ours do."""
import importlib.metadata
import os
import random

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1",
                  VLLM_LOGGING_LEVEL="ERROR")

import torch  # noqa: E402


def cap(isa):
    """vLLM chooses among its libraries of kernels by what torch says of the CPU."""
    if isa in ("avx512", "avx2"):
        torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
    if isa == "avx2":
        torch.cpu._is_avx512_supported = lambda: False


class Peer:
    def __init__(self, threads, isa, now):
        cap(isa)
        import vllm
        self.vllm = vllm
        self.version = f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"
        self.isa = isa
        self.now = now
        self.engines = {}
        self.running = {}  # a decode of so many sequences, where the engine is in the middle of one
        self.requests = 0

    def engine(self, model, dtype):
        if (model, dtype) not in self.engines:
            self.engines[model, dtype] = self.vllm.LLM(
                model=model, dtype=dtype, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=8192,
                enable_prefix_caching=False, async_scheduling=False, disable_log_stats=True).llm_engine
        return self.engines[model, dtype]

    def add(self, engine, ids, **sampling):
        self.requests += 1
        engine.add_request(str(self.requests), {"prompt_token_ids": ids},
                           self.vllm.SamplingParams(ignore_eos=True, detokenize=False, temperature=1.0, **sampling))
        return str(self.requests)

    def finish(self, engine, model, dtype):
        ids = self.running.pop((model, dtype), (None, []))[1]
        if ids:
            engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()

    def prompt(self, engine, tokens):
        vocabulary = engine.model_config.get_vocab_size()
        return [random.randrange(vocabulary) for _ in range(tokens)]

    def decode(self, model, batch, context, dtype):
        engine = self.engine(model, dtype)
        what, ids, left = self.running.get((model, dtype), (None, [], 0))
        if what != (batch, context) or left == 0:
            self.finish(engine, model, dtype)
            left = 32  # sequences grow by so many tokens, then they begin anew
            ids = [self.add(engine, self.prompt(engine, context), max_tokens=left + 2, logprobs=0) for _ in range(batch)]
            drawn = 0
            while drawn < batch:  # all prompts are read, and each has one token
                drawn = max(drawn, sum(1 for out in engine.step() if out.outputs))
        self.running[model, dtype] = ((batch, context), ids, left - 1)
        begin = self.now()
        out = engine.step()
        seconds = self.now() - begin
        if len(out) != batch:
            raise RuntimeError(f"a step gave {len(out)} tokens, not {batch}")
        return {"seconds": seconds}

    def prefill(self, model, tokens, dtype):
        engine = self.engine(model, dtype)
        self.finish(engine, model, dtype)
        self.add(engine, self.prompt(engine, tokens), max_tokens=1, logprobs=0)
        begin = self.now()
        while engine.has_unfinished_requests():
            engine.step()
        return {"seconds": self.now() - begin}

    def logprobs(self, model, ids, dtype):
        engine = self.engine(model, dtype)
        self.finish(engine, model, dtype)
        self.add(engine, ids, max_tokens=1, prompt_logprobs=0)
        got = None
        while engine.has_unfinished_requests():
            for out in engine.step():
                got = out.prompt_logprobs or got
        return {"logprobs": [at[token].logprob for at, token in zip(got[1:], ids[1:])]}
