"""PyTorch, with transformers for the model: gemm, decode, prefill, step, gradient, logprobs. Modes of a step and a gradient: float32,
autocast, bfloat16, and each of them behind `compiled `."""
import torch
import transformers

import peers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Peer:
    def __init__(self, threads, isa, now):
        torch.set_num_threads(threads)
        self.version = f"torch {torch.__version__}, transformers {transformers.__version__}"
        self.isa = isa
        self.now = now
        self.held = {}

    def once(self, key, make):
        if key not in self.held:
            self.held[key] = make()
        return self.held[key]

    def gemm(self, m, n, k, dtype, repeats):
        # As many matrices as ours are read from: none is in a cache when its turn comes.
        library, _, dtype = dtype.rpartition(" ")
        key = ("gemm", m, n, k)
        if key not in self.held:
            self.held.clear()  # what served the last product

        def make():
            copies = max(1, (160 << 20) // (n * k * 4))
            weights = [torch.randn(n, k, dtype=DTYPES[dtype]) for _ in range(copies)]
            x = torch.randn(m, k, dtype=DTYPES[dtype])
            if library == "OpenBLAS":  # numpy's
                return [w.numpy() for w in weights], lambda w, x=x.numpy(): x @ w.T, [0]
            if library == "oneDNN":  # weights packed before
                packed = [torch.ops.mkldnn._reorder_linear_weight(w, m) for w in weights]
                return packed, lambda w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), [0]
            return weights, lambda w: torch.nn.functional.linear(x, w), [0]

        weights, product, turn = self.once(key, make)
        begin = self.now()
        for _ in range(repeats):
            product(weights[turn[0] % len(weights)])
            turn[0] += 1
        return {"seconds": (self.now() - begin) / repeats}

    def model(self, folder, dtype):
        def make():
            return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa").eval()

        return self.once(("model", folder, dtype), make)

    def decode(self, model, batch, context, dtype):
        m = self.model(model, dtype)
        with torch.inference_mode():
            def make():
                one = m(torch.randint(m.config.vocab_size, (1, context)), use_cache=True).past_key_values
                cache = transformers.DynamicCache()
                for layer in range(m.config.num_hidden_layers):
                    held = one.layers[layer]
                    cache.update(*(x.expand(batch, -1, -1, -1).clone() for x in (held.keys, held.values)), layer)
                return cache

            cache = self.once(("cache", model, batch, context, dtype), make)
            if (more := cache.get_seq_length() - context) > 0:
                cache.crop(-more)
            ids = torch.randint(m.config.vocab_size, (batch, 1))
            begin = self.now()
            logits = m(ids, past_key_values=cache, use_cache=True).logits[:, -1].float()
            torch.log_softmax(logits, -1)
            return {"seconds": self.now() - begin}

    def prefill(self, model, tokens, dtype):
        m = self.model(model, dtype)
        with torch.inference_mode():
            ids = torch.randint(m.config.vocab_size, (1, tokens))
            begin = self.now()
            m(ids, use_cache=True, logits_to_keep=1)
            return {"seconds": self.now() - begin}

    def logprobs(self, model, ids, dtype):
        with torch.no_grad():  # what inference mode leaves behind, no step could use
            logits = self.model(model, dtype)(torch.tensor([ids])).logits[0, :-1].float()
            return {"logprobs": torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()}

    def step(self, model, rows, length, mode):
        compiled, kind = mode.startswith("compiled "), mode.removeprefix("compiled ")
        m = self.model(model, "bfloat16" if kind == "bfloat16" else "float32")

        def make():
            optimizer = torch.optim.AdamW(m.parameters(), lr=1e-6)
            # The moments are there before the first step is measured.
            m(torch.zeros(1, 2, dtype=torch.long)).logits.sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return optimizer, torch.compile(m) if compiled else m

        optimizer, forward = self.once(("step", model, mode), make)
        ids = torch.randint(m.config.vocab_size, (rows, length))
        peers.start_peak()
        begin = self.now()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            logits = forward(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"seconds": self.now() - begin, "peak_bytes": peers.peak_bytes()}

    def gradient(self, model, lengths, wanted, mode):
        """Forward and backward over separate rows, without padding: rows of one length are a batch. Logits of the wanted tokens alone."""
        compiled, kind = mode.startswith("compiled "), mode.removeprefix("compiled ")
        m = self.model(model, "bfloat16" if kind == "bfloat16" else "float32")
        body = self.once(("body", model, mode), lambda: torch.compile(m.model) if compiled else m.model)
        batches = {}
        for length, count in zip(lengths, wanted):
            batches.setdefault(length, []).append(count)
        batches = [(torch.randint(m.config.vocab_size, (len(counts), length)), counts) for length, counts in batches.items()]
        peers.start_peak()
        begin = self.now()
        for ids, counts in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                hidden = body(ids, use_cache=False).last_hidden_state
                # Of each row its last tokens: which ones changes nothing.
                picked = torch.cat([row[-1 - count:-1] for row, count in zip(hidden, counts)])
                logits = m.lm_head(picked)
            target = torch.cat([row[len(row) - count:] for row, count in zip(ids, counts)])
            torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum").backward()
        seconds = self.now() - begin
        m.zero_grad(set_to_none=False)  # as ours, which adds to gradients that are there
        return {"seconds": seconds, "peak_bytes": peers.peak_bytes()}
