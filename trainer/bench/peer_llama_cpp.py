"""llama.cpp, through the C functions that llama-cpp-python binds: decode (one batch of many sequences), prefill, logprobs. The model is
written as a GGUF file of the same weights beside the folder's, once a type: bfloat16, float16 or float32."""
import json
import os
import pathlib
import sys

import gguf
import numpy as np


def tensors(folder):
    """Names and arrays of a safetensors file, bf16 as the float32 it stands for."""
    with open(folder / "model.safetensors", "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    data = np.memmap(folder / "model.safetensors", np.uint8, "r", 8 + size)
    for name, about in header.items():
        if name == "__metadata__":
            continue
        begin, end = about["data_offsets"]
        raw = data[begin:end]
        if about["dtype"] == "BF16":
            array = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif about["dtype"] == "F32":
            array = np.array(raw.view(np.float32))
        else:
            raise ValueError(f"{name} is {about['dtype']}")
        yield name, array.reshape(about["shape"])


def interleaved(x, heads):
    """Rows of q and k in the order in which llama.cpp turns them: pairs side by side, not half a head apart."""
    rows, columns = x.shape
    return x.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(folder, dtype, path):
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"no GGUF is written of a {config['model_type']}")
    kind = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float16": gguf.GGMLQuantizationType.F16,
            "float32": gguf.GGMLQuantizationType.F32}[dtype]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_rope_dimension_count(config["head_dim"])
    w.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_vocab_size(config["vocab_size"])
    w.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, x in tensors(folder):
        if name.endswith("q_proj.weight"):
            x = interleaved(x, heads)
        elif name.endswith("k_proj.weight"):
            x = interleaved(x, kv_heads)
        as_kind = kind if x.ndim > 1 else gguf.GGMLQuantizationType.F32
        w.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(np.ascontiguousarray(x), as_kind), raw_dtype=as_kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


class Peer:
    def __init__(self, threads, isa, now):
        # The package's own libraries are built for this CPU; beside them lie those of less.
        capped = pathlib.Path(sys.prefix) / "lib" / f"llama_cpp-{isa}"
        if isa in ("avx2", "avx512"):
            os.environ["LLAMA_CPP_LIB_PATH"] = str(capped)
        global llama_cpp
        import llama_cpp
        about = llama_cpp.llama_print_system_info().decode()
        self.version = f"llama.cpp of llama-cpp-python {llama_cpp.__version__}"
        self.isa = next((word for word, mark in (("avx512_bf16", "AVX512_BF16 = 1"), ("avx512", "AVX512 = 1")) if mark in about), "avx2")
        if isa in ("avx2", "avx512") and self.isa != isa:
            raise ValueError(f"the libraries of {capped} use {self.isa}")
        self.now = now
        self.threads = threads
        self.models = {}
        self.contexts = {}
        # Silence, but for errors.
        self.log = llama_cpp.llama_log_callback(lambda level, text, _: os.write(2, text) if level == 4 else None)
        llama_cpp.llama_log_set(self.log, None)
        llama_cpp.llama_backend_init()

    def context(self, model, dtype, sequences, tokens, outputs):
        """One context at a time, of `sequences` of up to `tokens` each, empty."""
        key = (model, dtype, sequences, tokens, outputs)
        if key in self.contexts:
            return self.contexts[key]
        for held in self.contexts.values():
            llama_cpp.llama_free(held)
        self.contexts = {}
        if (model, dtype) not in self.models:
            path = pathlib.Path(model) / f"{dtype}.gguf"
            if not path.exists():
                write_gguf(pathlib.Path(model), dtype, path)
            loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
            if not loaded:
                raise RuntimeError(f"cannot load {path}")
            self.models[model, dtype] = loaded
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * tokens
        params.n_batch = params.n_ubatch = max(512, sequences)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.n_outputs_max = max(outputs, sequences)
        context = llama_cpp.llama_init_from_model(self.models[model, dtype], params)
        if not context:
            raise RuntimeError("llama_init_from_model failed")
        self.contexts[key] = context
        return context

    def vocabulary(self, model, dtype):
        return llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.models[model, dtype]))

    def run(self, context, entries):
        """Seconds of one batch of (token, position, sequence, whether its logits are wanted)."""
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        try:
            for i, (token, position, sequence, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
                batch.seq_id[i][0] = sequence
            batch.n_tokens = len(entries)
            begin = self.now()
            code = llama_cpp.llama_decode(context, batch)
            llama_cpp.llama_synchronize(context)
            seconds = self.now() - begin
        finally:
            llama_cpp.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode answered {code}")
        return seconds

    def decode(self, model, batch, context, dtype):
        new = (model, dtype, batch, context + 64, batch) not in self.contexts
        c = self.context(model, dtype, batch, context + 64, batch)
        vocabulary = self.vocabulary(model, dtype)
        memory = llama_cpp.llama_get_memory(c)
        if new:
            for sequence in range(batch):
                self.run(c, [((7919 * i + 3) % vocabulary, i, sequence, i == context - 1) for i in range(context)])
        seconds = self.run(c, [((104729 * s + 11) % vocabulary, context, s, True) for s in range(batch)])
        for sequence in range(batch):
            llama_cpp.llama_memory_seq_rm(memory, sequence, context, -1)
        return {"seconds": seconds}

    def prefill(self, model, tokens, dtype):
        c = self.context(model, dtype, 1, tokens + 64, 1)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(c), True)
        vocabulary = self.vocabulary(model, dtype)
        entries = [((7919 * i + 3) % vocabulary, i, 0, i == tokens - 1) for i in range(tokens)]
        return {"seconds": sum(self.run(c, entries[at:at + 512]) for at in range(0, tokens, 512))}

    def logprobs(self, model, ids, dtype):
        c = self.context(model, dtype, 1, len(ids) + 64, len(ids))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(c), True)
        vocabulary = self.vocabulary(model, dtype)
        self.run(c, [(token, i, 0, True) for i, token in enumerate(ids)])
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(c), (len(ids), vocabulary)).astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return {"logprobs": [float(logits[i, token]) for i, token in enumerate(ids[1:])]}
